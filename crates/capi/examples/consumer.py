"""Claims what a producer shares: a descriptor a line on standard input, as producer.c prints them."""

import sys

import gpu_ipc

with gpu_ipc.connect(sys.argv[1]) as participant:
    for line in sys.stdin:
        with participant.claim(bytes.fromhex(line)) as received:
            print(int.from_bytes(memoryview(received)[:8], "little"), flush=True)
