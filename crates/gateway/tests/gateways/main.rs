//! Several gateways on one machine, each a process with its broker, on loopback addresses of this test's own.
//!
//! The test program starts itself as the brokers.

mod fan_out;
mod host;
mod trust;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};

type Case = (&'static str, fn());

const CASES: [Case; 4] = [
    ("eight_pulls_cost_the_origin_two_reads", fan_out::eight_pulls_cost_the_origin_two_reads),
    (
        "a_certificate_of_another_authority_and_none_are_not_let_in",
        trust::a_certificate_of_another_authority_and_none_are_not_let_in,
    ),
    ("garbage_on_every_port_costs_nobody_else_anything", trust::garbage_on_every_port_costs_nobody_else_anything),
    ("either_of_two_gateways_of_one_broker_serves", trust::either_of_two_gateways_of_one_broker_serves),
];

fn main() -> ExitCode {
    host::serve_if_asked();
    let trial = |(name, case): Case| {
        Trial::test(name, move || {
            case();
            Ok::<(), Failed>(())
        })
    };
    libtest_mimic::run(&Arguments::from_args(), CASES.into_iter().map(trial).collect()).exit_code()
}
