//! Regions that grow in place: blocks that lie across several pieces of one range. On devices that
//! have ranges.

use std::sync::Arc;

use gpu_ipc::allocators::{Arena, ArenaOptions, Growth};
use gpu_ipc::session::ShareOptions;
use gpu_ipc::{After, Descriptor, Error, Gpu, Participant, ParticipantId, SentBlock, To, Wait};
use harness::{WATCHDOG, wait_until};

use crate::agent::{Agent, number};
use crate::device::{open_gpu, read_stamp, write_stamp};
use crate::words::{Command, Step};
use crate::{Case, Producer};

pub const CASES: &[Case] = &[
    (
        "growth::a_block_across_pieces_is_contiguous_and_goes_back_by_the_piece",
        across,
    ),
    (
        "growth::a_block_across_more_pieces_than_the_cache_keeps",
        beyond_the_cache,
    ),
    (
        "growth::a_block_across_pieces_that_is_only_read_is_mapped_apart",
        only_read,
    ),
    (
        "growth::a_consumer_in_the_same_process_gets_the_pointer",
        same_process,
    ),
    (
        "growth::a_consumer_that_dies_between_two_pieces_pins_neither",
        dies_between,
    ),
    (
        "growth::what_fragments_fixed_regions_fits_where_they_grow_in_place",
        fragmentation,
    ),
];

pub const PIECE: u64 = 2 << 20;

fn arena(gpu: &Gpu, in_place: bool, pieces: u64) -> Arc<Arena> {
    let options = ArenaOptions::default()
        .growth(Growth::Fixed(PIECE))
        .limit(pieces * PIECE)
        .grows_in_place(in_place);
    Arena::new(gpu.clone(), options).expect("an arena")
}

/// A producer whose arena grows in place.
pub fn growing(pieces: u64) -> Producer {
    let gpu = open_gpu();
    assert!(gpu.caps().ranges, "this device has no ranges of addresses");
    Producer::on(gpu.clone(), |builder| {
        builder.arena(&arena(&gpu, true, pieces))
    })
}

impl Producer {
    /// Has the arena map this number of pieces, and leaves them free.
    pub fn grow(&self, pieces: u64) {
        let blocks: Vec<_> = (0..pieces)
            .map(|_| self.session.alloc(PIECE).expect("there is room"))
            .collect();
        drop(blocks);
        assert_eq!(self.session.stats().source.regions, pieces);
    }

    /// Stamps a block at its beginning, across the end of each of its pieces, and at its end.
    fn stamp_through(&self, block: &SentBlock) {
        for (number, at) in places(block.len()).enumerate() {
            write_stamp(
                &self.gpu,
                &self.stream,
                block.device_ptr().offset(at),
                stamp(number),
            );
        }
    }

    fn share(&self, block: &SentBlock, to: ParticipantId) -> Descriptor {
        block
            .share(To::Participant(to), After::Done)
            .expect("shared")
    }

    fn reserved(&self) -> u64 {
        let _ = self.session.trim();
        self.session.stats().source.reserved
    }
}

/// Lists where a block of whole pieces is stamped.
fn places(len: u64) -> impl Iterator<Item = u64> {
    let ends = (1..len / PIECE).map(|piece| piece * PIECE - 4);
    std::iter::once(0).chain(ends).chain([len - 8])
}

fn stamp(number: usize) -> u64 {
    0x0123_4567_89ab_cdef ^ number as u64
}

/// Has a consumer look at all stamps of a block.
fn is_stamped(consumer: &mut Agent, block: u64) -> bool {
    let len = consumer.len(block);
    places(len).enumerate().all(|(number, at)| {
        let slice = consumer.slice(block, at, at + 8);
        let seen = consumer.stamp(slice);
        consumer.let_go(slice);
        seen == stamp(number)
    })
}

fn across() {
    let producer = growing(64);
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    producer.grow(4);
    // The first piece, which the consumer maps for itself, and then the second to the fourth.
    let first = producer.session.alloc(PIECE).expect("there is room");
    let block = producer
        .session
        .alloc(3 * PIECE)
        .expect("three pieces are free");
    assert_eq!(
        producer.session.stats().source.reserved,
        4 * PIECE,
        "nothing was added for it"
    );
    producer.stamp_through(&block);
    let one = consumer.claim(&producer.share(&first, id));
    assert_eq!(consumer.mappings(), 1);
    let all = consumer.claim(&producer.share(&block, id));
    assert_eq!(consumer.mappings(), 4, "each piece is mapped once");
    assert!(is_stamped(&mut consumer, all));
    let again = consumer.claim(&producer.share(&block, id));
    assert!(is_stamped(&mut consumer, again));
    assert_eq!(consumer.mappings(), 4);
    // Nothing goes back that a consumer uses.
    drop((first, block));
    consumer.let_go(all);
    assert_eq!(producer.reserved(), 4 * PIECE);
    assert!(
        is_stamped(&mut consumer, again),
        "the other lease holds the pieces"
    );
    // The tail does, once the consumer has unmapped it; the first piece is in use.
    consumer.let_go(again);
    wait_until("the tail to go back", || {
        producer.session.collect();
        producer.reserved() == PIECE
    });
    assert_eq!(consumer.mappings(), 1);
    // The places are used again, for other memory, by a block that begins in the middle of the
    // first piece.
    consumer.let_go(one);
    producer.wait_for_nothing_held();
    let half = producer.session.alloc(PIECE / 2).expect("there is room");
    let block = producer.session.alloc(2 * PIECE).expect("there is room");
    producer.stamp_through(&block);
    let again = consumer.claim(&producer.share(&block, id));
    assert!(is_stamped(&mut consumer, again));
    consumer.let_go(again);
    drop((half, block));
    wait_until("all to go back", || {
        producer.session.collect();
        producer.reserved() == 0
    });
    assert_eq!(consumer.mappings(), 0);
    consumer.disconnect();
}

fn beyond_the_cache() {
    let producer = growing(64);
    let mut consumer = Agent::start();
    let socket = producer.session.socket_path().into();
    let id = ParticipantId(number(consumer.must(&Command::ConnectWithCache {
        socket,
        bytes: PIECE,
        regions: 1,
    })));
    producer.grow(5);
    let block = producer
        .session
        .alloc(5 * PIECE)
        .expect("five pieces are free");
    producer.stamp_through(&block);
    for _ in 0..3 {
        let claimed = consumer.claim(&producer.share(&block, id));
        assert_eq!(consumer.mappings(), 5, "what is in use stays mapped");
        assert!(is_stamped(&mut consumer, claimed));
        consumer.let_go(claimed);
        wait_until("idle pieces to go", || consumer.mappings() <= 1);
    }
}

fn only_read() {
    let producer = growing(64);
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    producer.grow(3);
    let block = producer
        .session
        .alloc(3 * PIECE)
        .expect("three pieces are free");
    producer.stamp_through(&block);
    let only_read = block
        .share_with(
            To::Participant(id),
            After::Done,
            &ShareOptions::default().read_only(),
        )
        .expect("shared");
    let read = consumer.claim(&only_read);
    assert_eq!(consumer.mappings(), 3);
    let written = consumer.claim(&producer.share(&block, id));
    assert_eq!(consumer.mappings(), 6, "each piece is mapped in both ways");
    let end = 3 * PIECE - 8;
    let (read_end, written_end) = (
        consumer.slice(read, end, end + 8),
        consumer.slice(written, end, end + 8),
    );
    assert!(is_stamped(&mut consumer, read) && is_stamped(&mut consumer, written));
    assert!(consumer.is_read_only(read_end) && !consumer.is_read_only(written_end));
    consumer.write(read_end, 1).expect_err("it is only read");
    consumer.write(written_end, 2).expect("it may be written");
    assert_eq!(consumer.stamp(read_end), 2, "one memory");
    drop(block);
    consumer.let_go_of_all();
    producer.wait_for_nothing_held();
    wait_until("all to go back", || producer.reserved() == 0);
    assert_eq!(consumer.mappings(), 0);
}

fn same_process() {
    let producer = growing(64);
    let participant = Participant::builder(producer.gpu.clone());
    let participant = participant
        .connect(producer.session.socket_path())
        .expect("connected");
    producer.grow(2);
    let block = producer
        .session
        .alloc(2 * PIECE)
        .expect("two pieces are free");
    let descriptor = producer.share(&block, participant.id());
    let claimed = participant
        .claim(descriptor.as_bytes(), Wait::Host, Some(WATCHDOG))
        .expect("claimed");
    assert_eq!(
        (claimed.device_ptr(), claimed.len()),
        (block.device_ptr(), 2 * PIECE)
    );
    assert_eq!(participant.mappings(), 2);
    let ptr = claimed.device_ptr().offset(PIECE - 4);
    write_stamp(&producer.gpu, &producer.stream, ptr, 7);
    assert_eq!(read_stamp(&producer.gpu, &producer.stream, ptr), 7);
    drop((claimed, block));
    producer.wait_for_nothing_held();
    wait_until("all to go back", || producer.reserved() == 0);
}

fn dies_between() {
    let producer = growing(64);
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    producer.grow(2);
    let first = producer.session.alloc(PIECE / 2).expect("there is room");
    let block = producer.session.alloc(PIECE).expect("there is room");
    assert_eq!(
        producer.session.stats().source.regions,
        2,
        "it begins in the first piece and ends in the second"
    );
    consumer.claim(&producer.share(&first, id));
    let descriptor = producer.share(&block, id);
    // The next piece that it asks for is the second.
    consumer.die_at(Step::Map);
    consumer.tell(&crate::agent::claim(
        &descriptor,
        crate::words::Waits::OnTheHost,
    ));
    consumer.dies();
    drop((first, block));
    producer.wait_for_nothing_held();
    wait_until("both pieces to go back", || producer.reserved() == 0);
    assert_eq!(producer.session.stats().leaked_blocks, 0);
}

/// Fills a device of 16 pieces with blocks that fit no piece evenly, has a consumer hold each of
/// them, and counts them.
fn fill(in_place: bool) -> usize {
    let gpu = open_gpu();
    let producer = Producer::on(gpu.clone(), |builder| {
        builder.arena(&arena(&gpu, in_place, 16))
    });
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let mut held = Vec::new();
    let full = loop {
        match producer.session.alloc(PIECE / 8 * 3) {
            Ok(block) => held.push(block),
            Err(error) => break error,
        }
        let block = held.last().expect("it was just added");
        let end = block.device_ptr().offset(block.len() - 8);
        write_stamp(&producer.gpu, &producer.stream, end, stamp(held.len()));
        let claimed = consumer.claim(&producer.share(block, id));
        let slice = consumer.slice(claimed, block.len() - 8, block.len());
        assert_eq!(consumer.stamp(slice), stamp(held.len()));
    };
    assert!(matches!(full, Error::OutOfMemory { .. }), "{full}");
    held.len()
}

fn fragmentation() {
    // Each piece of 2 MiB has two blocks of 768 KiB and a quarter that is nobody's. In place only
    // the last has a rest.
    let (fixed, in_place) = (fill(false), fill(true));
    println!(
        "16 pieces of 2 MiB hold {fixed} blocks of 768 KiB on their own, and {in_place} in place"
    );
    assert_eq!((fixed, in_place), (32, 42));
}
