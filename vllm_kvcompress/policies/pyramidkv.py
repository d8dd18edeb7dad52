"""PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling,
arXiv 2406.02069."""

from dataclasses import dataclass, replace
from typing import Self

from vllm_kvcompress.policies import ModelHeads, parameter
from vllm_kvcompress.policies.parts.allocation import spread
from vllm_kvcompress.policies.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV with larger budgets in the first layers.

    The last layer's budget beyond the window is 1/beta of the mean, so the first one's is
    2 - 1/beta of it, or the full prompt.

    A pipeline stage divides its own budget in the proportions of its layers in the model.

    Attributes:
        block_size: tokens of a page, once bound to a model.
        first_layer: layers of earlier pipeline stages, once bound.
        later_layers: layers of later pipeline stages, once bound.
    """

    name = "pyramidkv"
    batches = True
    stages = SnapKV.stages._replace(allocate="falls linearly from the first layer to the last")
    decides = ("how much each layer keeps",)
    layer_dependent = True

    beta: float = parameter(20.0, "steepness of the pyramid", 1.0)
    block_size: int = 0
    first_layer: int = 0
    later_layers: int = 0

    def bind(self, model: ModelHeads) -> Self:
        return replace(
            self,
            block_size=model.block_size,
            first_layer=model.first_layer,
            later_layers=model.later_layers,
        )

    def layer_pages(
        self, num_blocks: int, capacity: list[int], num_heads: int, num_logical_blocks: int = 0
    ) -> list[int]:
        """Pages of each layer; every head of a layer has the same number."""
        num_layers = len(capacity)
        if num_layers == 1:
            return [num_blocks * num_heads]
        per_head = [pages // num_heads for pages in capacity]
        window = self.window_size / self.block_size
        mean = num_blocks - window
        shares = [1.0] * num_layers
        if mean > 0:
            low = mean / self.beta
            high = 2 * mean - low
            room = max(per_head) - window
            if high > room:
                high, low = room, 2 * mean - room
            step = (high - low) / (self.first_layer + num_layers + self.later_layers - 1)
            own = range(self.first_layer, self.first_layer + num_layers)
            shares = [window + high - layer * step for layer in own]
        units = spread(shares, num_blocks * num_layers, per_head, [1] * num_layers)
        return [pages * num_heads for pages in units]
