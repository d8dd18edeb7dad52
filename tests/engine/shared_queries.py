"""Reports the queries of a prompt's layers, and those that its event shows to the policy."""

from __future__ import annotations

from typing import Any


def recorded(report: dict[str, Any]) -> None:
    """Records both for a single request whose prompt is read in one step (a probe)."""
    from vllm_kvcompress.compression.view import EventViews
    from vllm_kvcompress.vllm_plugin.worker_side.attention import base

    report["queries"], report["views"] = {}, []
    forward, view_of = base.CompressedImpl.forward, EventViews.view

    def forwarding(self: Any, layer: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        if len(query) > 1:
            report["queries"][layer.layer_name] = query.tolist()
        return forward(self, layer, query, *args, **kwargs)

    def viewing(self: Any, *args: Any, **kwargs: Any) -> Any:
        view = view_of(self, *args, **kwargs)
        report["views"].append(view.queries.tolist())
        return view

    base.CompressedImpl.forward, EventViews.view = forwarding, viewing
