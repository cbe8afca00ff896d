"""What PyTorch itself does with counter files, without a GPU. Each line of the input is a command:

    release NAME SLOT    PyTorch decreases a counter, as it does when it drops a received tensor
    make COUNT           PyTorch makes a file of shared memory, by the allocator that its counter files use too, with COUNT
                         numbers of 8 bytes, all 7: answered by its name
    see SLOT             the number there
    drop                 PyTorch lets that file go
    pack                 the message of a fixed tuple, in hexadecimal
    unpack HEX           what gpu_tensors.py reads in a message
"""

import os
import sys
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import torch  # noqa: E402

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "examples", "torch"))
sys.dont_write_bytecode = True
import gpu_tensors  # noqa: E402

print(torch.__version__, flush=True)
made = None
for line in sys.stdin:
    command, *arguments = line.split()
    if command == "release":
        torch.UntypedStorage._release_ipc_counter_cuda(arguments[0].encode(), int(arguments[1]))
        answer = "released"
    elif command == "make":
        made = torch.full((int(arguments[0]),), 7, dtype=torch.int64)
        _, name, _ = made.untyped_storage()._share_filename_cpu_()
        answer = name.decode()
    elif command == "see":
        answer = int(made[int(arguments[0])])
    elif command == "drop":
        made, answer = None, "dropped"
    elif command == "pack":
        fields = (3, bytes([7]) * 64, 0x1000, 0x200, b"/torch_1_2_3", 5, bytes([9]) * 64, True)
        answer = gpu_tensors.pack(fields, bytes([8]) * 16, torch.float32, 1, (3,), (4,)).hex()
    elif command == "unpack":
        answer = gpu_tensors.unpack(bytes.fromhex(arguments[0]))
    print(answer, flush=True)
