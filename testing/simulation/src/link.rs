//! One host's way out, shared fairly by the reads that it serves.
//!
//! A reader has one read at a time, so no two ways out share a way in: filling each link by itself
//! gives the max-min fair rates of the whole network.

use std::time::Duration;

/// One read on a link.
#[derive(Clone, Debug)]
pub struct Flow {
    /// Who reads.
    pub reader: u32,
    /// Bytes that are still to come.
    pub left: f64,
    /// What the reader takes at most, in bytes a second.
    pub most: f64,
    /// Bytes a second at this moment.
    pub rate: f64,
}

/// The reads that a host serves.
#[derive(Clone, Debug)]
pub struct Link {
    /// Bytes a second.
    pub capacity: f64,
    /// Bytes that went out.
    pub sent: f64,
    flows: Vec<Flow>,
    at: Duration,
}

impl Link {
    /// Makes one without reads.
    #[must_use]
    pub fn new(capacity: f64) -> Link {
        Link {
            capacity,
            sent: 0.0,
            flows: Vec::new(),
            at: Duration::ZERO,
        }
    }

    /// Returns its reads as they are at a time.
    pub fn flows(&mut self, now: Duration) -> &[Flow] {
        self.advance(now);
        &self.flows
    }

    /// Begins a read.
    pub fn add(&mut self, now: Duration, reader: u32, left: f64, most: f64) {
        self.advance(now);
        self.flows.push(Flow {
            reader,
            left,
            most,
            rate: 0.0,
        });
        self.share();
    }

    /// Ends a reader's read and returns it.
    pub fn remove(&mut self, now: Duration, reader: u32) -> Option<Flow> {
        self.advance(now);
        let place = self.flows.iter().position(|flow| flow.reader == reader)?;
        let flow = self.flows.remove(place);
        self.share();
        Some(flow)
    }

    /// Lets nothing through for ever, or takes a reader's end off.
    pub fn stop(&mut self, now: Duration, reader: Option<u32>) {
        self.advance(now);
        match reader {
            None => self.capacity = 0.0,
            Some(reader) => self
                .flows
                .iter_mut()
                .filter(|f| f.reader == reader)
                .for_each(|flow| flow.most = 0.0),
        }
        self.share();
    }

    /// Returns who is done first, and when.
    #[must_use]
    pub fn first_done(&self) -> Option<(Duration, u32)> {
        let moving = self.flows.iter().filter(|flow| flow.rate > 0.0);
        // A nanosecond more than the rounded quotient: the bytes have come by then.
        let ends = moving.map(|flow| {
            (
                self.at + Duration::from_secs_f64(flow.left / flow.rate) + NANO,
                flow.reader,
            )
        });
        ends.min()
    }

    fn advance(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.at).as_secs_f64();
        self.at = self.at.max(now);
        for flow in &mut self.flows {
            let came = (flow.rate * passed).min(flow.left);
            flow.left -= came;
            self.sent += came;
        }
    }

    /// Fills the link: who takes least first, the rest in equal parts.
    fn share(&mut self) {
        let mut order: Vec<usize> = (0..self.flows.len()).collect();
        order.sort_by(|&a, &b| self.flows[a].most.total_cmp(&self.flows[b].most));
        let (mut left, mut readers) = (self.capacity, order.len());
        for place in order {
            let flow = &mut self.flows[place];
            flow.rate = flow.most.min(left / readers as f64);
            left -= flow.rate;
            readers -= 1;
        }
    }
}

const NANO: Duration = Duration::from_nanos(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_reader_leaves_its_part_to_the_others() {
        let zero = Duration::ZERO;
        let mut link = Link::new(10.0);
        link.add(zero, 1, 90.0, 10.0);
        link.add(zero, 2, 10.0, 1.0);
        assert_eq!(
            link.flows(zero)
                .iter()
                .map(|flow| flow.rate)
                .collect::<Vec<_>>(),
            [9.0, 1.0]
        );
        assert_eq!(link.first_done(), Some((Duration::from_secs(10) + NANO, 1)));
        let at = Duration::from_secs(5);
        let gone = link.remove(at, 2).expect("it reads");
        assert_eq!((gone.left, link.sent), (5.0, 50.0));
        assert_eq!(link.flows(at)[0].rate, 10.0);
        link.stop(at, None);
        assert_eq!(link.first_done(), None);
    }
}
