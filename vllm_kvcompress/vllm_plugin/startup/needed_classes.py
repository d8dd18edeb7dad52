"""The classes of ours that vLLM has to be given together: one alone would compress nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_kvcompress.config import Settings
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.vllm_plugin.startup import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_classes(vllm_config: VllmConfig, settings: Settings | None) -> None:
    """Refuses to start without one of the classes that compress, which wait for each other.

    The scheduler, the worker and the statistics logger each ask, since vLLM builds whichever of
    them the command line names, and takes its own for the others.

    Raises:
        UnsupportedError: names the option that is missing.
    """
    if settings is None or not settings.acts:
        return
    for reason in missing_classes(vllm_config, settings):
        raise UnsupportedError(reason)


def is_ours(name: str, value: object) -> bool:
    """Whether vLLM was given one of our classes, or a subclass.

    Args:
        name: scheduler_cls or worker_cls.
        value: what was given: a class, or its dotted path.

    Raises:
        UnsupportedError: the path leads nowhere.
    """
    from vllm_kvcompress.vllm_plugin.scheduler_side.scheduler import CompressionMixin
    from vllm_kvcompress.vllm_plugin.worker_side.worker import CompressionWorker

    bases = {"scheduler_cls": CompressionMixin, "worker_cls": CompressionWorker}
    return _is_subclass(value, bases[name])


def missing_classes(config: VllmConfig, settings: Settings) -> Iterator[str]:
    """Yields a sentence for each of our classes, or subclasses of them, that vLLM was not given."""
    ours = compat.plugin_options(settings)
    given = {
        "scheduler_cls": config.scheduler_config.scheduler_cls,
        "worker_cls": config.parallel_config.worker_cls,
    }
    for name, value in given.items():
        if value == ours[name] or is_ours(name, value):
            continue
        option = f"--{name.replace('_', '-')}"
        yield (
            f"--additional-config asks for compression, but {option} is {value or 'not given'}, so "
            f"nothing would be compressed; add {option} {ours[name]} (or a subclass of it), or "
            "start with `vllm-kvcompress serve`, which gives all options that are needed."
        )


def _is_subclass(named: object, base: type) -> bool:
    """Whether an option of vLLM that takes a class, or its dotted path, was given a subclass.

    Raises:
        UnsupportedError: the path leads nowhere.
    """
    found = named
    if isinstance(named, str):
        try:
            found = resolve_obj_by_qualname(named)
        except (ImportError, AttributeError, ValueError) as error:
            raise UnsupportedError(
                f"{named} cannot be imported ({type(error).__name__}: {error}); expected the path "
                f"of a class, such as {base.__module__}.{base.__qualname__}."
            ) from error
    return isinstance(found, type) and issubclass(found, base)
