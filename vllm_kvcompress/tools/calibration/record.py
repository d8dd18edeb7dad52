"""What a calibration found, as a file: one of a model, a policy and the settings beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from vllm_kvcompress.config.auto import AUTO, profile_beside
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.calibration.bounds import upper_bound
from vllm_kvcompress.tools.files import read_within, write_whole

REVISION = 2  # of the file; others are refused
WHOLE = 1.0  # the budget that loses nothing
_MAX_BYTES = 16 * 2**20
_SAMPLED_BYTES = 2**16  # of each end of every file of weights


@dataclass(frozen=True)
class TextLosses:
    """The losses of one text.

    Attributes:
        kind: what kind of text it is.
        length: tokens that were compressed, one of the calibration's lengths.
        calibrates: whether it is of the half that bounds follow from; the other half checks them.
        losses: nats per token above the full cache's, by the budgets of the calibration.
    """

    kind: str
    length: int
    calibrates: bool
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Rung:
    """What was found at one length and budget: of the half that calibrates, and of the other."""

    length: int
    budget: float
    num_texts: int
    mean: float
    bound: float
    num_checked: int
    checked_mean: float


@dataclass(frozen=True)
class Calibration:
    """Losses of texts at a ladder of budgets.

    Attributes:
        model, model_digest: the model's name, and `digest_of_model`.
        policy: as users name it, such as `auto`.
        conditions: `conditions_of` the other settings.
        vllm: version of vLLM.
        lengths: tokens of texts that are compressed, ascending; prompts go by the longest length
            that they have.
        continuation: tokens behind them that are predicted.
        cap: a text that loses more counts as this much, in nats per token.
        confidence: with which the bounds of all lengths hold.
        budgets: of the ladder, without `WHOLE`.
        texts: in the order in which they were drawn.
    """

    model: str
    model_digest: str
    policy: str
    conditions: dict[str, Any]
    vllm: str
    lengths: tuple[int, ...]
    continuation: int
    cap: float
    confidence: float
    budgets: tuple[float, ...]
    texts: tuple[TextLosses, ...]

    def rungs(self) -> list[Rung]:
        """By length, the budgets from the largest on, with their bounds."""
        places = sorted(range(len(self.budgets)), key=lambda place: -self.budgets[place])
        return [self._rung(length, place) for length in self.lengths for place in places]

    def _rung(self, length: int, place: int) -> Rung:
        halves = [self._losses(length, place, calibrates) for calibrates in (True, False)]
        means = [fmean(half) if half else 0.0 for half in halves]
        bound = upper_bound(halves[0], self.cap, self.confidence_of_one)
        sizes = list(map(len, halves))
        return Rung(length, self.budgets[place], sizes[0], means[0], bound, sizes[1], means[1])

    def _losses(self, length: int, place: int, calibrates: bool) -> list[float]:
        texts = [t for t in self.texts if (t.length, t.calibrates) == (length, calibrates)]
        return [min(self.cap, text.losses[place]) for text in texts]

    @property
    def confidence_of_one(self) -> float:
        """Confidence of one length's bound, so that all hold together (Bonferroni)."""
        return 1 - (1 - self.confidence) / len(self.lengths)

    def by_length(self, limit: float, lowest: float = 0.0) -> dict[int, float]:
        """Returns, by length, the smallest budget whose bound is at most `limit`, or `WHOLE`.

        Args:
            limit: nats per token.
            lowest: budgets below it are not chosen.
        """
        bounds: dict[int, list[tuple[float, float]]] = {length: [] for length in self.lengths}
        for rung in self.rungs():
            if rung.budget >= lowest:
                bounds[rung.length].append((rung.budget, rung.bound))
        return {length: smallest_budget(each, limit) for length, each in bounds.items()}

    def check(self, model: str, policy: str, conditions: Mapping[str, Any], path: Path) -> None:
        """Refuses a calibration of something else; a model of "" is not compared.

        Raises:
            ConfigError: names what was calibrated, and what is served.
        """
        wanted = {"policy": policy, **conditions}
        found = {"policy": self.policy, **self.conditions}
        if model and not self._is_of(model):
            wanted, found = {"model": model} | wanted, {"model": self.model} | found
        for name, value in wanted.items():
            if found.get(name) != value or name == "model":
                raise ConfigError(
                    f"{path}: a calibration of {name} {found.get(name)}, expected one of {value}; "
                    f"make it with `{calibrate_command(model or self.model, policy)}`."
                )

    def _is_of(self, model: str) -> bool:
        digest = digest_of_model(model)
        return digest == self.model_digest if digest else model == self.model

    def write(self, path: Path) -> None:
        """Writes the file whole, with what follows from the losses beside them."""
        document = {"revision": REVISION, **asdict(self)}
        document["rungs"] = list(map(asdict, self.rungs()))
        texts = ",\n  ".join(map(json.dumps, document.pop("texts")))
        text = json.dumps(document, indent=1).removesuffix("\n}")
        write_whole(path, f'{text},\n "texts": [\n  {texts}\n ]\n}}\n')

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Reads a calibration.

        Raises:
            ConfigError: there is none, or it is no calibration of this revision.
        """
        try:
            document = json.loads(read_within(path, _MAX_BYTES))
            values = {field.name: document[field.name] for field in fields(cls)}
            values["budgets"] = tuple(map(float, values["budgets"]))
            values["lengths"] = tuple(map(int, values["lengths"]))
            values["texts"] = tuple(_texts(values["texts"], len(values["budgets"])))
            found = document["revision"]
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{path}: expected a calibration, and it cannot be read ({error!r}); make one with "
                "`vllm-kvcompress calibrate`."
            ) from None
        if found != REVISION:
            raise ConfigError(
                f"{path}: expected a calibration of revision {REVISION}, found {found!r}; make it "
                "anew with `vllm-kvcompress calibrate`."
            )
        return cls(**values)


def _texts(rows: Sequence[Mapping[str, Any]], num_budgets: int) -> Iterator[TextLosses]:
    for row in rows:
        losses = tuple(map(float, row["losses"]))
        if len(losses) != num_budgets:
            raise ValueError(f"{len(losses)} losses for {num_budgets} budgets")
        yield TextLosses(str(row["kind"]), int(row["length"]), bool(row["calibrates"]), losses)


def smallest_budget(bounds: Sequence[tuple[float, float]], limit: float) -> float:
    """Returns the smallest budget down to which every bound is at most `limit`.

    Budgets are tested from the largest on, up to the first that fails. So the probability that any
    of those passed wrongly is that of one bound, however many there are.
    """
    chosen = WHOLE
    for budget, bound in sorted(bounds, reverse=True):
        if bound > limit:
            break
        chosen = budget
    return chosen


def calibrate_command(model: str, policy: str) -> str:
    """Returns the command that makes a calibration."""
    return f"vllm-kvcompress calibrate {model} --kv-policy {policy}"


def conditions_of(settings: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Returns the settings besides policy and budget that decide what is lost.

    Args:
        settings: by their keys in YAML.
        model: name or directory; `auto` finds measured heads in a directory.
    """
    profile = settings.get("profile")
    if profile is None and settings.get("policy") == AUTO:
        profile = profile_beside(model)
    checked = {"policy": "none", "trigger": settings.get("trigger") or "prompt"}
    return {
        "trigger": Settings.from_dict(checked).trigger,
        "params": dict(settings.get("params") or {}),
        "measure_heads": settings.get("measure_heads", True),
        "profile": None if profile is None else _digest_of_file(Path(profile)),
    }


def _digest_of_file(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error}); check --kv-profile.") from None


def digest_of_model(model: str) -> str:
    """Returns a digest of a model's config and of the ends of its weights' files.

    Empty for a hub's name whose files are not on this machine.
    """
    folder = _folder(model)
    if folder is None:
        return ""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*")):
        if path.name == "config.json":
            digest.update(path.read_bytes())
        elif path.suffix in (".safetensors", ".bin", ".pt", ".gguf"):
            digest.update(f"{path.name} {path.stat().st_size} ".encode())
            with path.open("rb") as file:
                digest.update(file.read(_SAMPLED_BYTES))
                file.seek(max(0, path.stat().st_size - _SAMPLED_BYTES))
                digest.update(file.read())
    return digest.hexdigest()[:32]


def _folder(model: str) -> Path | None:
    """The directory that holds a model's files; None: they are not on this machine."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def file_name(model: str, policy: str, conditions: Mapping[str, Any]) -> str:
    """Returns the name of a calibration among those of other models, policies and settings."""
    key = [digest_of_model(model) or model, policy, dict(conditions)]
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32] + ".json"
