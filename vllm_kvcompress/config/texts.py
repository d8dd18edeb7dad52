"""What a server says of its settings."""

from __future__ import annotations

from vllm_kvcompress.config.auto import DEFAULT_BUDGET, DEFAULT_POLICY, MEASURING_PART
from vllm_kvcompress.config.fields import SETTINGS_KEY
from vllm_kvcompress.config.settings import Settings


def budget_text(settings: Settings) -> str:
    """Says the budget and the ceiling; of the default also how to change it."""
    text = f"{settings.budget:g} of each prompt"
    if not isinstance(settings.budget, float):
        text = f"{settings.budget} tokens per KV head"
    elif settings.budget == DEFAULT_BUDGET and settings.promised_loss is None:
        text += f" (the default; --kv-budget, or budget under {SETTINGS_KEY}, changes it)"
    for least, budget in settings.longer_budgets.items():
        text += f", {budget:g} from {least} tokens on"
    if settings.ceiling is not None:
        text += f" and never more than {settings.ceiling} tokens per KV head"
    if settings.promised_loss is not None:
        text += f" (promised to lose at most {settings.promised_loss:g} nats per token"
        text += f", by {settings.calibration})" if settings.calibration else ")"
    return text


def start_lines(settings: Settings) -> list[str]:
    """Says what the settings do, and which ones would be better; a server prints it first."""
    text = _summary(settings)
    if settings.read_rule is not None:
        prompts = " and prompts" if settings.read_rule.prefill_tokens else ""
        text += f"; decode steps{prompts} read {settings.read}"
    if settings.draft is not None:
        text += f"; drafts read {settings.draft}, and are verified"
    if settings.prompts is not None:
        text += f"; {settings.prompts}"
    if settings.promised_loss is not None and settings.budget == 1.0:
        warning = (
            f"WARNING: no budget below 1.0 is sure to lose at most {settings.promised_loss:g} nats "
            f"per token by {settings.calibration}; allow more, or calibrate with more texts"
        )
        return [text, warning]
    if not settings.compresses or settings.policy != DEFAULT_POLICY:
        return [text]
    advice = (
        "measured heads would lose far less in the same memory: serve with --kv-policy auto, "
        "without --no-kv-measure-heads"
    )
    return [text, advice]


def _summary(settings: Settings) -> str:
    if not settings.policies:
        return "nothing is compressed"
    if not settings.compresses and settings.may_compress:
        choices = ", ".join(settings.request_policies)
        return f"requests choose among {choices}; others are not compressed"
    if not settings.compresses:
        return f"policy {settings.policy} with budget 1.0 keeps everything: stock vLLM"
    text = f"policy {settings.policy}, budget {budget_text(settings)}, trigger {settings.trigger}"
    if isinstance(settings.budget, float) and settings.budget < 1:
        text += f"; a compressed prompt holds about {1 / settings.budget:.3g} times fewer blocks"
    return f"{text}; {heads_text(settings)}" if heads_text(settings) else text


def heads_text(settings: Settings) -> str:
    """Says where the server's own policy has measured heads from; empty: it uses none."""
    if settings.profile is not None:
        return f"heads as measured in {settings.profile}"
    if MEASURING_PART not in settings.policy.split("+"):
        return ""
    return "heads are measured when the engine starts, unless an earlier start has"
