"""`vllm-kvcompress plan`: computes how many requests fit at a time, stock and compressed."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pydantic import ByteSize, TypeAdapter, ValidationError

from vllm_kvcompress.cli import serve
from vllm_kvcompress.cli.vllm_command import option_values
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.vllm_plugin.startup.distribution import is_cpu_build

if TYPE_CHECKING:
    from vllm_kvcompress.tools.capacity import ModelShape

_READ = (
    "max-model-len",
    "block-size",
    "tensor-parallel-size",
    "pipeline-parallel-size",
    "gpu-memory-utilization",
)
_MAX_SIZE = 2**60  # bytes of memory, or tokens
_EPILOG = """\
Takes the options of `vllm-kvcompress serve`, those of vLLM included; of these it reads --dtype,
--kv-cache-dtype, --max-model-len, --block-size, --tensor-parallel-size, --pipeline-parallel-size
and --gpu-memory-utilization. Weights are those of the model's config.json, which is all that is
read of the model.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options; all others are those of `serve`."""
    parser.usage = (
        "%(prog)s MODEL (--gpu-memory SIZE | --kv-cache-memory SIZE) [any `serve` option]"
    )
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    parser.set_defaults(takes_any_option=True)
    memory = parser.add_mutually_exclusive_group(required=True)

    def add(to: Any, flag: str, help: str, metavar: str = "SIZE", **more: Any) -> None:
        to.add_argument(flag, type=size, metavar=metavar, help=help, **more)

    add(memory, "--gpu-memory", "memory of each GPU, such as 80GiB")
    add(memory, "--kv-cache-memory", "memory of the KV cache alone, per rank")
    add(parser, "--context", "tokens of a request, such as 32k (the model's longest)", "TOKENS")
    add(parser, "--weights-memory", "memory of all ranks' weights, if quantized")
    lists = "list budgets and types of caches under which so many fit, the least loss first"
    parser.add_argument("--requests", type=_count, metavar="N", help=lists)
    usage = "activations, graphs and events on a GPU, which vLLM measures (3GiB)"
    add(parser, "--other-memory", usage, default=3 * 2**30)


def run(arguments: argparse.Namespace) -> int:
    """Prints how many requests fit, and how that follows from the model."""
    from vllm_kvcompress.tools import capacity, combinations

    own = argparse.ArgumentParser(prog="vllm-kvcompress plan", add_help=False, allow_abbrev=False)
    add_options(own)
    namespace, rest = own.parse_known_args(arguments.rest)
    request = serve.parse_request(rest)
    options = {
        name: values[-1]
        for name in ("dtype", "kv-cache-dtype", *_READ)
        if (values := option_values(request.vllm_arguments, f"--{name}"))
    }
    if not request.vllm_arguments or request.vllm_arguments[0].startswith("-"):
        raise ConfigError("expected a model first: a folder, or a name on the Hugging Face hub.")
    model = request.vllm_arguments[0]
    num_ranks = int(_number(options, "tensor-parallel-size", 1))
    cache_dtype = options.get("kv-cache-dtype", "auto")
    shape = capacity.read_shape(model, options.get("dtype"), num_ranks, cache_dtype)
    shape = shape.largest_stage(int(_number(options, "pipeline-parallel-size", 1)))
    if namespace.weights_memory is not None:
        shape = shape.with_weights(namespace.weights_memory)
    cache = namespace.kv_cache_memory
    if cache is None:
        share = _number(options, "gpu-memory-utilization", capacity.GPU_MEMORY_UTILIZATION)
        cache = int(share * namespace.gpu_memory) - shape.weight_bytes - namespace.other_memory
    length = namespace.context or int(_number(options, "max-model-len", shape.longest))
    on_cpu = namespace.gpu_memory is None and is_cpu_build()
    default = capacity.CPU_BLOCK_SIZE if on_cpu else capacity.BLOCK_SIZE
    block_size = int(_number(options, "block-size", default))
    if namespace.requests is not None:
        if "kv-cache-dtype" in options or (request.settings and request.settings.compresses):
            raise ConfigError(
                "--requests chooses the budget and the type of the cache: leave out --kv-policy, "
                "--kv-budget and --kv-cache-dtype, or leave out --requests."
            )
        types = _served_types(shape, block_size, on_cpu)
        rows = combinations.combinations(shape, cache, length, block_size, types)
        print("\n".join(combinations.report(rows, namespace.requests, length)))
        if on_cpu:
            print(f"for this CPU, which serves {', '.join(types)}; --gpu-memory: for GPUs")
        return 0
    plan = capacity.plan(shape, request.settings, cache, length, block_size)
    print(capacity.report(model, shape, plan))
    return 0


def _served_types(shape: ModelShape, block_size: int, on_cpu: bool) -> list[str]:
    """Returns the types of caches that were measured and are served: all of them on GPUs."""
    from vllm_kvcompress.tools.combinations import LOSSES

    if not on_cpu:
        return list(LOSSES)
    import torch

    from vllm_kvcompress.vllm_plugin.compat.config import reason_against_cpu_cache

    known = torch.bfloat16, block_size, shape.head_size
    return [name for name in LOSSES if reason_against_cpu_cache(name, *known) is None]


def _number(options: dict[str, str], name: str, default: float) -> float:
    """One of vLLM's numeric options: a whole number, or a share of at most 1."""
    text = options.get(name, str(default))
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= _MAX_SIZE or (number > 1 and number % 1):
        raise ConfigError(f"--{name} {text}: expected a positive number.")
    return number


def _count(text: str) -> int:
    """Parses a positive number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, found {text!r}")
    return int(text)


def size(text: str) -> int:
    """Parses a number of bytes or tokens, such as 80GiB, 512MB or 32k."""
    spelled = text.lower() + {"k": "ib", "i": "b"}.get(text[-1:].lower(), "")  # 32k: 32,768 tokens
    try:
        number = int(TypeAdapter(ByteSize).validate_python(spelled))
    except ValidationError:
        number = -1
    if not 0 <= number <= _MAX_SIZE:
        raise argparse.ArgumentTypeError(f"expected a size such as 80GiB or 32k, found {text!r}")
    return number
