"""Images whose tokens see each other are compressed behind the last one, on the GPU path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from tests.engine.conftest import request
from tests.engine.masked_oracle import MaskedDecoder
from tests.engine.test_divided_blocks import check, kept_of
from tests.gpu_path import images
from tests.gpu_path.conftest import Run
from tests.tiny_models import prompt

PAGE, TOLERANCE = 32, 1e-4  # of log-probabilities; causal images change them by 0.05 and more
TEXT = [token % images.IMAGE for token in prompt(400, seed=1)]
# vLLM sets the first of these where it finds CUDA.
HOW: dict[str, Any] = {"disable_chunked_mm_input": True, "max_num_batched_tokens": 96}
HOW |= {"probes": ["tests.gpu_path.images:without_torchvision"]}
SETTINGS = {"policy": "adakv+criticalkv", "budget": 0.25}
SETTINGS |= {"min_request_budget": 0.25, "max_request_budget": 1.0}


def with_images(name: str, files: list[str], *texts: int, **more: Any) -> dict[str, Any]:
    """Makes a request of texts of so many tokens, with an image between each two."""
    tokens = TEXT[: texts[0]]
    for start, number in enumerate(texts[1:], start=1):
        tokens = [*tokens, images.START, *TEXT[start : start + number]]
    return request(name, tokens, 5, images=files[: len(texts) - 1], **more)


def spelled_out(asked: dict[str, Any]) -> list[int]:
    """Returns a request's tokens, with those of its images."""
    places = {images.START: images.PLACE}
    return [token for each in asked["prompt"] for token in places.get(each, [each])]


def oracle(
    model: str, asked: dict[str, Any], events: list[dict[str, Any]], end: int
) -> MaskedDecoder:
    """Reads a request's prompt, of whose first `end` tokens those behind see what was kept."""
    tokens = spelled_out(asked)
    pictures = [Image.open(path) for path in asked["images"]]
    processor = AutoProcessor.from_pretrained(model).image_processor
    kinds = [int(each == images.IMAGE) for each in tokens[:end]]
    decoder = MaskedDecoder(
        model,
        tokens[:end],
        [kept_of(event, PAGE) for event in sorted(events, key=lambda each: each["layer"])],
        end // PAGE * PAGE,
        pixel_values=processor(pictures, return_tensors="pt")["pixel_values"],
        token_type_ids=torch.tensor([kinds]),
    )
    for token in tokens[end:]:
        decoder.first_logits = decoder.step(token)
    return decoder


def is_same(output: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether the log-probabilities of two outputs are the same."""
    pairs = zip(output["logprobs"], expected["logprobs"], strict=True)
    return all(ours == pytest.approx(theirs, abs=TOLERANCE) for ours, theirs in pairs)


def test_images_are_compressed_behind_the_last_one(tmp_path: Path, run_gpu_path: Run) -> None:
    """Each beside compressed requests; the third names a context that ends within an image.

    A prefix-cache hit ends within one, too: the queries behind it are computed.
    """
    model = str(images.build(tmp_path))
    files = [images.draw(tmp_path / f"{seed}.png", seed) for seed in (1, 2)]
    ends = {"two": 190, "late": 176, "context": 150}
    asked = [
        with_images("two", files, 70, 10, 70),
        with_images("late", files[::-1], 120, 36, at_step=4),
        with_images("context", files, 60, 50, 40, at_step=8, xargs={"kv_context_tokens": 140}),
    ]
    stock = run_gpu_path(model, [asked], **HOW)
    whole = [
        {**one, "id": f"whole {one['id']}", "salt": "whole", "xargs": {"kv_budget": 1.0}}
        for one in asked
    ]
    again = {**asked[1], "id": "again"}
    report = run_gpu_path(
        model, [asked, [*whole, again]], settings=SETTINGS, record_kept=True, **HOW
    )
    for name, expected in stock["outputs"].items():
        output = report["outputs"][f"whole {name}"]
        assert output["tokens"] == expected["tokens"], name
        assert is_same(output, expected), name
        assert not is_same(report["outputs"][name], expected), name
    assert [each["source_tokens"] for each in report["events"]] == [
        end // PAGE * PAGE for end in (*ends.values(), ends["late"])
    ]
    found, expected = (report["outputs"][name] for name in ("again", "late"))
    assert found["cached"] == 128
    assert spelled_out(again)[127:129] == [images.IMAGE] * 2
    assert found["tokens"] == expected["tokens"]
    assert is_same(found, expected)
    for number, one in enumerate(asked):
        name, kept = one["id"], report["kept"][2 * number : 2 * number + 2]
        check(oracle(model, one, kept, ends[name]), report["outputs"][name], TOLERANCE)
    assert report["free_at_end"] == report["num_blocks"] - 1
