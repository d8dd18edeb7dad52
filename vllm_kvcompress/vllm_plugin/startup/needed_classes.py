"""Checks that vLLM is given both our scheduler and our worker: one alone compresses nothing."""

from __future__ import annotations

from collections.abc import Iterator

from vllm.config import VllmConfig
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.vllm_plugin.compat.options import plugin_options


class CompressingScheduler:
    """Base of our schedulers, by which `is_ours` knows them and their subclasses."""


class CompressingWorker:
    """Base of our workers, by which `is_ours` knows them and their subclasses."""


_BASES = {"scheduler_cls": CompressingScheduler, "worker_cls": CompressingWorker}


def check_classes(vllm_config: VllmConfig, settings: Settings | None) -> None:
    """Refuses to start if one of our classes is missing.

    The scheduler, the worker and the statistics logger each check, since vLLM builds those that
    the command line names and uses its own for the others.

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
    given = value
    if isinstance(value, str):
        try:
            given = resolve_obj_by_qualname(value)
        except (ImportError, AttributeError, ValueError) as error:
            raise UnsupportedError(
                f"{value} cannot be imported ({type(error).__name__}: {error}); expected the path "
                f"of a class for --{name.replace('_', '-')}, such as "
                "my_package.my_module.MyClass."
            ) from error
    return isinstance(given, type) and issubclass(given, _BASES[name])


def missing_classes(config: VllmConfig, settings: Settings) -> Iterator[str]:
    """Yields a sentence for each of our classes, or subclasses of them, that vLLM was not given."""
    ours = plugin_options(settings)
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
