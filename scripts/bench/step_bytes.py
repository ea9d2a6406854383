#!/usr/bin/env python3
"""Count the operations and bytes of a masked-LM step of ``mlsm_modern``, without a GPU, and the time that they take.

    python scripts/bench/step_bytes.py [--layers 12 --width 768 --batch-size 64 --block 512 --vocab 8000]

The forward and backward pass of encoder, head and loss run on tensors without data, in bfloat16. The script counts the
floating-point operations of matrix products and attention, and the bytes read and written:

- ``eager``: each operation reads its inputs and writes its outputs;
- ``compiled``: one graph for all, which joins elementwise operations and reductions with the following operations. Only
  the inputs of a matrix product, attention or a gather are written, and the tensors kept for the backward pass.

The lower bound in milliseconds is the larger of the times for the operations and for the bytes, at the peak rates of
the chip (default: one H200).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from mlsm_plugin.core.masking.chosen_tokens import ChosenTokens, chosen_sizes
from mlsm_plugin.fairseq_plugin.models import modern_layers
from mlsm_plugin.fairseq_plugin.models.modern_layers import ModernSize, ModernTransformer
from mlsm_plugin.huggingface.student_model import geglu_dim

# operations that are not joined with their neighbours; all others are elementwise, reductions or views
ALONE = ("mm", "bmm", "addmm", "scaled_dot_product", "embedding", "index", "gather", "sort", "rotary_angles")
VIEWS = {"view", "reshape", "permute", "transpose", "expand", "slice", "split", "unsqueeze", "squeeze"}
VIEWS |= {"select", "alias", "detach", "t", "_unsafe_view", "getitem", "unbind", "chunk", "as_strided"}


def size_of(values: Any) -> int:
    """Bytes of all tensors in ``values``."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


class Bytes(TorchDispatchMode):
    """Adds up the bytes that each operation reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in VIEWS:
            self.total += size_of([args, kwargs, result])
        return result


def name_of(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]


def value_of(node: Node) -> Any:
    return node.meta.get("val")


def joined_bytes(graph: GraphModule) -> int:
    """Bytes of a graph in which all operations except :data:`ALONE` are joined with the operations that read them."""
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    (output,) = [node for node in graph.graph.nodes if node.op == "output"]

    def is_alone(node: Node) -> bool:
        return node.op != "call_function" or name_of(node).strip("_").startswith(ALONE)

    def sources(read: Iterable[Node]) -> set[Node]:
        """The stored values from which these values are computed."""
        stored: set[Node] = set()
        pending = list(read)
        while pending:
            node = pending.pop()
            if is_alone(node) or node in written:
                stored.add(node)
            else:
                pending += node.all_input_nodes
        return stored

    written: set[Node] = set()
    needed = {node for user in [*filter(is_alone, nodes), output] for node in user.all_input_nodes}
    total = 0
    for node in nodes:
        if is_alone(node):
            total += size_of([value_of(source) for source in node.all_input_nodes]) + size_of(value_of(node))
        elif node in needed and name_of(node) not in VIEWS:
            total += size_of([value_of(source) for source in sources(node.all_input_nodes)]) + size_of(value_of(node))
            written.add(node)
    return total


class Step(nn.Module):
    """Encoder, head and loss."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        ffn = geglu_dim(args.width)
        heads = max(1, args.width // 64)
        size = ModernSize(args.vocab, 1, args.layers, args.width, ffn, heads)
        self.encoder = ModernTransformer(size, nn.Embedding(args.vocab, args.width, 1))
        self.dense = nn.Linear(args.width, args.width, bias=False)
        self.norm = modern_layers.Norm(args.width)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, only: ChosenTokens) -> torch.Tensor:
        hidden = self.encoder(tokens, has_padding=False, only=only)["encoder_out"][0].transpose(0, 1).squeeze(0)
        transformed = self.norm(nn.functional.gelu(self.dense(hidden)))
        logits = nn.functional.linear(transformed, self.encoder.embed_tokens.weight)
        return nn.functional.cross_entropy(logits.float(), targets, reduction="sum")


def main() -> None:
    """Count, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="default: 12")
    parser.add_argument("--width", type=int, default=768, help="a multiple of 64 (default: 768)")
    parser.add_argument("--batch-size", type=int, default=64, help="samples in a batch (default: 64)")
    parser.add_argument("--block", type=int, default=512, help="tokens of a sample (default: 512)")
    parser.add_argument("--vocab", type=int, default=8000, help="pieces (default: 8000)")
    parser.add_argument("--tflops", type=float, default=790, help="10^12 operations a second (default: 790)")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="10^12 bytes a second (default: 4.3)")
    args = parser.parse_args()
    modern_layers.LONGEST_UNFUSED = 0  # fused attention, as on a GPU
    joined: list[int] = []

    def count(graph: GraphModule, inputs: Any) -> Any:
        joined.append(joined_bytes(graph))
        return make_boxed_func(graph.forward)

    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", torch.bfloat16):
        step = Step(args)
        tokens = torch.empty(args.batch_size, args.block, dtype=torch.long)
        _, most, total = chosen_sizes([0] * args.batch_size, [args.block] * args.batch_size, 0.15)
        places = torch.empty(args.batch_size, most, dtype=torch.long)
        only = ChosenTokens(tokens.new_empty(total), places, tokens.new_empty(total))
        batch = tokens, tokens.new_empty(total), only
        with Bytes() as eager, FlopCounterMode(display=False) as flops:
            step(*batch).backward()
        step.zero_grad()
        counting = aot_autograd(fw_compiler=count, bw_compiler=count)
        torch.compile(step, fullgraph=True, dynamic=False, backend=counting)(*batch).backward()
    operations = flops.get_total_flops()
    print(f"| {args.layers} x {args.width}, {args.batch_size} x {args.block} tokens | GB | ms at least | of eager |")
    print("| --- | --- | --- | --- |")
    for name, moved in {"eager": eager.total, "compiled": sum(joined)}.items():
        print(f"| {name} | {moved / 1e9:.1f} | {moved / args.bandwidth / 1e9:.1f} | {moved / eager.total:.2f} |")
    print(f"\nmatrix products and attention: {operations / 1e12:.1f} TFLOP, {operations / args.tflops / 1e9:.1f} ms")


if __name__ == "__main__":
    main()
