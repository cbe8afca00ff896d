//! Several gateways on one machine, each a process with its broker, on loopback addresses of this
//! test's own.
//!
//! The test program starts itself as the brokers.

mod carriers;
mod fan_out;
mod host;
mod kept;
mod pulls;
mod registration;
mod rings;
mod rogue;
mod trust;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};

type Case = (&'static str, fn());

const CASES: [Case; 30] = [
    (
        "a_carrier_that_is_killed_is_started_again_and_costs_its_leases_alone",
        carriers::a_carrier_that_is_killed_is_started_again_and_costs_its_leases_alone,
    ),
    (
        "a_carrier_that_pulls_and_is_killed_costs_another_attempt",
        carriers::a_carrier_that_pulls_and_is_killed_costs_another_attempt,
    ),
    (
        "a_carrier_is_caged_and_maps_what_is_lent_alone",
        carriers::a_carrier_is_caged_and_maps_what_is_lent_alone,
    ),
    (
        "bytes_that_are_altered_on_the_way_are_found_and_not_committed",
        carriers::bytes_that_are_altered_on_the_way_are_found_and_not_committed,
    ),
    (
        "a_name_that_is_followed_is_kept_current",
        pulls::a_name_that_is_followed_is_kept_current,
    ),
    (
        "one_request_pulls_many_objects_and_a_group",
        pulls::one_request_pulls_many_objects_and_a_group,
    ),
    (
        "what_is_left_is_pulled_when_the_process_that_pulls_is_killed",
        pulls::what_is_left_is_pulled_when_the_process_that_pulls_is_killed,
    ),
    (
        "a_lease_that_is_anothers_is_not_renewed_filled_confirmed_or_ended",
        rogue::a_lease_that_is_anothers_is_not_renewed_filled_confirmed_or_ended,
    ),
    (
        "a_gateway_that_grants_another_object_puts_nothing_here",
        rogue::a_gateway_that_grants_another_object_puts_nothing_here,
    ),
    (
        "what_was_removed_here_is_not_said_to_be_here",
        rogue::what_was_removed_here_is_not_said_to_be_here,
    ),
    (
        "silent_connections_keep_no_newcomer_out",
        rogue::silent_connections_keep_no_newcomer_out,
    ),
    (
        "questions_that_are_too_long_cost_no_memory",
        rogue::questions_that_are_too_long_cost_no_memory,
    ),
    (
        "an_origin_that_is_gone_before_the_confirmation_costs_no_patience",
        rogue::an_origin_that_is_gone_before_the_confirmation_costs_no_patience,
    ),
    (
        "a_namesake_of_the_home_removes_nothing",
        rogue::a_namesake_of_the_home_removes_nothing,
    ),
    (
        "the_list_of_many_objects_is_whole",
        rogue::the_list_of_many_objects_is_whole,
    ),
    (
        "a_lease_is_renewed_while_the_object_is_made",
        registration::a_lease_is_renewed_while_the_object_is_made,
    ),
    (
        "a_gateway_ends_with_its_keeper",
        kept::a_gateway_ends_with_its_keeper,
    ),
    (
        "eight_pulls_cost_the_origin_two_reads",
        fan_out::eight_pulls_cost_the_origin_two_reads,
    ),
    (
        "a_certificate_of_another_authority_and_none_are_not_let_in",
        trust::a_certificate_of_another_authority_and_none_are_not_let_in,
    ),
    (
        "a_gateway_logs_its_start_and_what_it_was_told_to",
        trust::a_gateway_logs_its_start_and_what_it_was_told_to,
    ),
    (
        "garbage_on_every_port_costs_nobody_else_anything",
        trust::garbage_on_every_port_costs_nobody_else_anything,
    ),
    (
        "questions_are_answered_while_an_object_is_registered",
        registration::questions_are_answered_while_an_object_is_registered,
    ),
    (
        "a_pull_waits_for_a_long_registration",
        registration::a_pull_waits_for_a_long_registration,
    ),
    (
        "either_of_two_gateways_of_one_broker_serves",
        trust::either_of_two_gateways_of_one_broker_serves,
    ),
    (
        "each_way_brings_every_byte_and_the_choice_is_shown",
        rings::each_way_brings_every_byte_and_the_choice_is_shown,
    ),
    (
        "a_way_that_does_not_lead_there_is_an_error",
        rings::a_way_that_does_not_lead_there_is_an_error,
    ),
    (
        "a_panic_in_the_middle_of_a_read_ends_the_process",
        rings::a_panic_in_the_middle_of_a_read_ends_the_process,
    ),
    (
        "a_group_is_pulled_member_by_member_and_its_roll",
        rings::a_group_is_pulled_member_by_member_and_its_roll,
    ),
    (
        "killed_at_each_step_of_a_ring",
        rings::killed_at_each_step_of_a_ring,
    ),
    (
        "stopped_at_a_fill_beyond_the_leases_end",
        rings::stopped_at_a_fill_beyond_the_leases_end,
    ),
];

fn main() -> ExitCode {
    host::serve_if_asked();
    let trial = |(name, case): Case| {
        Trial::test(name, move || {
            case();
            Ok::<(), Failed>(())
        })
    };
    libtest_mimic::run(
        &Arguments::from_args(),
        CASES.into_iter().map(trial).collect(),
    )
    .exit_code()
}
