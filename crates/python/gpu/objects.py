"""Objects under an advance, as an engine in PyTorch has them: cuBLAS, captured graphs and compiled modules.

    python objects.py --program ./gpu-ipc [--device cuda:0] [--without compile] [NAME...]

Each check maps weights once, makes its engine once, and then advances five times at the same addresses: every answer must
be that of the epoch that is mapped, computed from a copy of it.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator

import running
import torch

import gpu_ipc

options: argparse.Namespace

EPOCHS = 5
WIDTH = 1024


class Layers(torch.nn.Module):
    """Two matrix products, for which cuBLAS takes a workspace, and something between them."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(x @ self.weights["first"])
        return torch.addmm(self.weights["bias"], hidden, self.weights["second"])


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device=options.device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=options.device, dtype=torch.bfloat16) / WIDTH**0.5

    return {"first": normal(WIDTH, WIDTH), "second": normal(WIDTH, WIDTH), "bias": normal(WIDTH)}


@contextlib.contextmanager
def broker_of_its_own() -> Iterator[gpu_ipc.Broker]:
    with tempfile.TemporaryDirectory() as folder, running.broker(options.program, folder, options.device):
        with gpu_ipc.connect_broker(folder, options.device) as broker:
            yield broker


def under_an_advance(make: Callable[[Layers, torch.Tensor], Callable[[], torch.Tensor]]) -> None:
    """Make an engine over mapped weights once, and compare its answers with those of a copy, epoch by epoch."""
    with broker_of_its_own() as broker:
        x = torch.randn(64, WIDTH, device=options.device, dtype=torch.bfloat16)
        broker.put("model", weights_of(1))
        model = broker.open("model")
        tensors = model.tensors()
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        answer = make(Layers(tensors), x)
        torch.cuda.synchronize()
        answers = []
        for seed in range(1, EPOCHS + 1):
            if seed > 1:
                broker.put("model", weights_of(seed))
                # The advance waits for streams that it was told of; nothing else may be on its way.
                torch.cuda.synchronize()
                assert model.advance(), seed
                assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == addresses
            for name, expected in weights_of(seed).items():
                assert torch.equal(tensors[name], expected), (seed, name)
            expected = Layers(weights_of(seed))(x)
            for _ in range(3):
                got = answer()
                torch.cuda.synchronize()
                torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
            answers.append(expected)
        # An engine that went on with the first epoch would have been found.
        for former, latter in zip(answers, answers[1:], strict=False):
            assert not torch.allclose(former, latter, rtol=2e-2, atol=2e-2)
        del tensors, answer


def eager_products_see_the_next_epoch() -> None:
    under_an_advance(lambda layers, x: lambda: layers(x))


def a_captured_graph_with_cublas_workspaces_sees_the_next_epoch() -> None:
    def make(layers: Layers, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        # Warm, on a stream of its own, as PyTorch asks for: cuBLAS takes its workspace there.
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                layers(x)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layers(x)

        def replay() -> torch.Tensor:
            graph.replay()
            return out.clone()

        return replay

    under_an_advance(make)


def compiled(mode: str) -> Callable[[Layers, torch.Tensor], Callable[[], torch.Tensor]]:
    def make(layers: Layers, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        torch._dynamo.reset()
        module = torch.compile(layers, mode=mode)

        def run() -> torch.Tensor:
            with torch.no_grad():
                # What a graph of the compiler's answers with is overwritten by the next answer.
                return module(x).clone()

        # Compiled, warm, and recorded where the mode records.
        for _ in range(4):
            run()
        return run

    return make


def a_compiled_module_sees_the_next_epoch() -> None:
    under_an_advance(compiled("default"))


def a_compiled_module_with_graphs_sees_the_next_epoch() -> None:
    under_an_advance(compiled("reduce-overhead"))


CHECKS = [
    eager_products_see_the_next_epoch,
    a_captured_graph_with_cublas_workspaces_sees_the_next_epoch,
    a_compiled_module_sees_the_next_epoch,
    a_compiled_module_with_graphs_sees_the_next_epoch,
]


def main() -> int:
    global options
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", default="gpu-ipc", help="the program of this project")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--without", action="append", default=[], choices=["compile"])
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    chosen = running.choose(parser, options.names, CHECKS)
    if "compile" in options.without:
        chosen = [check for check in chosen if "compiled" not in check.__name__]
    return running.run("python-objects", chosen)


if __name__ == "__main__":
    sys.exit(main())
