"""Mutants that change one line of shardformer: layers, attention, parallel axes, losses, policies, stages."""

from __future__ import annotations

from zoo_tests.campaigns.mutations.edits import Edit

PARITY = "zoo_tests/parity/test_parity.py::test_trains_like_plain_training"
CONTEXT = "zoo_tests/parity/test_context_parallel.py::test_shared_sequences_train_like_plain_training"
EXPERTS = "zoo_tests/parity/test_expert_parallel.py::test_experts_on_several_ranks_train_like_plain_training"
CAPACITY = "zoo_tests/parity/test_expert_parallel.py::test_what_an_expert_has_no_room_for_is_dropped"
HEADS = "zoo_tests/parity/test_heads.py::test_head_trains_like_plain_training"
ALL_TO_ALL = "zoo_tests/parity/test_sequence_modes.py::test_all_to_all_trains_like_plain_training"
_ULYSSES = "enable_sequence_parallelism=True-sequence_parallelism_mode=all_to_all"
_DROPOUT = "zoo_tests/parity/test_dropout.py"
_SHARDFORMER = "zoo_tests/shardformer"
_ZIGZAG = f"{_SHARDFORMER}/context_parallel/test_zigzag.py"
_KEPT_APART = f"{_SHARDFORMER}/attention/test_packed_documents.py"
_CROSS_ENTROPY = f"{_SHARDFORMER}/layers/test_embedding.py::test_cross_entropy"
_FUSED = f"{_SHARDFORMER}/cross_entropy/test_fused_linear.py::test_head_over_two_ranks"
_ROUTERS = f"{_SHARDFORMER}/loss/test_routers.py::test_it_is_that_of_plain_training"
_MIXTRAL = "mixtral-causal_lm-dp2-zero1-momentum-fp32-clip-ep_size=2"
_CROWDED = "mixtral-causal_lm-tp2-zero1-momentum-fp32-clip-ep_size=1-expert_capacity_factor=0.6"
_WITHOUT_PACKAGE = "test_without_a_package_documents_run_on_the_kernel_of_torch"
_KERNELS = "enable_flash_attention=True-enable_fused_normalization=True"

_MESSAGES = "zoo_tests/parity/test_stage_messages.py::test_what_later_stages_read_travels"

EDITS_OF_SHARDFORMER: dict[str, Edit] = {
    # layers, matmul
    "gradient of a column input keeps one rank's part": Edit(
        "shardformer.matmul.native",
        "            work = dist.all_reduce(grad_x, group=ctx.group, async_op=True)\n",
        "            work = None\n            grad_x = grad_x.view_as(x)\n",
        (f"{PARITY}[llama-causal_lm-tp2-zero1]",),
    ),
    "bias of a row layer added by every rank": Edit(
        "shardformer.matmul.native",
        "self.multiply(layer, layer.own_features(x), None)",
        "self.multiply(layer, layer.own_features(x), layer.bias)",
        (f"{PARITY}[bert-masked_lm-tp2-zero1]",),
    ),
    "tokens of other ranks looked up as the first row": Edit(
        "shardformer.layers.embedding",
        "out.masked_fill(elsewhere.unsqueeze(-1), 0.0)",
        "out",
        (f"{PARITY}[llama-causal_lm-tp2-zero1]",),
    ),
    "last row of a cut vocabulary belongs to nobody": Edit(
        "shardformer.layers.embedding",
        "(ids >= self.end_row)",
        "(ids >= self.end_row - 1)",
        (f"{PARITY}[llama-causal_lm-tp2-zero1]",),
    ),
    "padding row of a cut embedding learns": Edit(
        "shardformer.layers.embedding",
        "embedding(local_ids, self.weight, self._local_padding_idx())",
        "embedding(local_ids, self.weight)",
        (f"{_SHARDFORMER}/layers/test_embedding.py::test_embedding[1021-1-0]",),
    ),
    "weight gradient of the last micro-batch alone": Edit(
        "shardformer.matmul.kernel",
        "backend.write_grad_weight(memory, adds,",
        "backend.write_grad_weight(memory, False,",
        (f"{PARITY}[bert-masked_lm-pp2-zero1]",),
    ),
    "lookup forgets earlier micro-batches": Edit(
        "shardformer.matmul.kernel",
        "        if not adds:\n            memory.zero_()",
        "        memory.zero_()",
        (f"{PARITY}[llama-causal_lm-pp2-zero1]",),
    ),
    "gathered logits cut at the wrong end": Edit(
        "shardformer.layers.linear",
        "[..., : self.full_out_features]",
        "[..., -self.full_out_features :]",
        (f"{_SHARDFORMER}/layers/test_embedding.py::test_head[1021-True]",),
    ),
    # distributed, sequence_parallel
    "partial gradients of what all ranks read": Edit(
        "shardformer.distributed.collectives",
        "return _all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group), None",
        "return grad.clone(memory_format=torch.contiguous_format), None",
        (f"{CAPACITY}[{_CROWDED}]",),
    ),
    "gradient of gathered rows counted once": Edit(
        "shardformer.distributed.collectives",
        "grad[ctx.start : ctx.stop] * ctx.size",
        "grad[ctx.start : ctx.stop]",
        (f"{_ROUTERS}[2-options3]",),
    ),
    "gradient of a gathered sequence not summed": Edit(
        "shardformer.distributed.collectives",
        "return reduce_scatter_dim(grad, ctx.dim, ctx.group), None, None, None, None",
        "return local_slice(grad, ctx.dim, ctx.group), None, None, None, None",
        (f"{PARITY}[bert-masked_lm-tp2-zero1-sp]",),
    ),
    "sequence padded in front": Edit(
        "shardformer.distributed.collectives",
        "(0, 0) * (x.dim() - dim - 1) + (0, missing), value=fill",
        "(0, 0) * (x.dim() - dim - 1) + (missing, 0), value=fill",
        (f"{_SHARDFORMER}/distributed/test_sequence_parallel.py::test_enter_and_leave[5]",),
    ),
    "positions of the first slice on every rank": Edit(
        "shardformer.distributed.sequence_parallel",
        "first = dist.get_rank(region.group) * share",
        "first = 0",
        (f"{ALL_TO_ALL}[qwen3-causal_lm-tp2-zero1-momentum-clip-{_ULYSSES}]",),
    ),
    "copied heads in another order": Edit(
        "shardformer.distributed.sequence_parallel",
        "x.repeat_interleave(size // x.shape[1], 1)",
        "x.repeat(1, size // x.shape[1], 1, 1)",
        (f"{CONTEXT}[llama-causal_lm-cp4-zero1-momentum-clip-sequence_parallelism_mode=all_to_all]",),
    ),
    "no gradient of the encoder through cross-attention": Edit(
        "shardformer.distributed.sequence_parallel",
        "{**kwargs, name: self.region.split(kwargs[name])}",
        "{**kwargs, name: self.region.split(kwargs[name]).detach()}",
        (f"{CONTEXT}[t5-generation-cp2tp2-zero1-momentum-fp32-clip-sequence_parallelism_mode=all_to_all]",),
    ),
    "gradients twice behind layers that ranks share": Edit(
        "shardformer.transforms.layout_checks",
        "return all_gather(x, SEQ_DIM, self.group, self.length)",
        "return all_gather(2 * x - x.detach(), SEQ_DIM, self.group, self.length)",
        (f"{CONTEXT}[t5-generation-cp2tp2-zero1-momentum-fp32-clip-sequence_parallelism_mode=all_to_all]",),
    ),
    "position biases of other heads": Edit(
        "shardformer.distributed.sequence_parallel",
        "return type(self).compute_bias(self, length, length, **options)",
        "return type(self).compute_bias(self, length, length, **options).flip(1)",
        (f"{CONTEXT}[t5-generation-cp2tp2-zero1-momentum-fp32-clip-sequence_parallelism_mode=all_to_all]",),
    ),
    # attention
    "one random stream for all heads": Edit(
        "shardformer.attention.registry",
        'rank = getattr(module, "sharded_attention_rank", None)\n',
        "rank = 0\n",
        (f"{_DROPOUT}::test_heads_are_dropped_differently_on_every_rank",),
    ),
    "masks without our names": Edit(
        "shardformer.attention.registry",
        "    AttentionMaskInterface.register(name, masks_of(implementation))\n\n\ndef masks_of",
        "    masks_of(implementation)\n\n\ndef masks_of",
        (f"{PARITY}[bert-masked_lm-tp2-zero1]",),
    ),
    "packed documents told apart where the batch asks for a cache": Edit(
        "shardformer.attention.packed_documents",
        'return bool(inputs.get("use_cache")) or cache_name(inputs) is not None',
        "return cache_name(inputs) is not None",
        (f"{_KEPT_APART}::test_documents_are_kept_apart_unless_the_batch_says_otherwise[{{}}]",),
    ),
    "documents of RoBERTa begin at the position of padding": Edit(
        "plugins.hybrid_parallel.boosted.forward_options",
        "positions + first * (positions.amin(dim=-1, keepdim=True) == 0)",
        "positions",
        (f"{_KEPT_APART}::test_an_encoder_keeps_documents_apart[Roberta]",),
    ),
    "masks of three rows of positions read the texts' own": Edit(
        "shardformer.attention.packed_documents",
        "not has_none and _passes_positions(call, keys)",
        "_passes_positions(call, keys)",
        (f"{_KEPT_APART}::test_masks_that_read_a_fourth_row_of_positions",),
    ),
    "micro-batches with a rotary embedding of their own": Edit(
        "plugins.hybrid_parallel.boosted.forward_options",
        "(field == packed_documents.ROTARY and is_unequal)",
        "False",
        (f"{_KEPT_APART}::test_rotary_embeddings_that_depend_on_the_longest_sample[longrope]",),
    ),
    "chunks of attention are counted from the start of a row": Edit(
        "plugins.hybrid_parallel.boosted.forward_options",
        "if count > most and (are_documents or",
        "if count > most and field == ROTARY and (are_documents or",
        (f"{_KEPT_APART}::test_what_is_counted_from_the_start_of_a_row_is_refused",),
    ),
    "masks without positions let documents see each other": Edit(
        "shardformer.transforms.sequences",
        " & (numbers[row, query] == numbers[row, key])",
        "",
        (f"{_KEPT_APART}::test_an_encoder_keeps_documents_apart[Bert]",),
    ),
    "flash-attn is told of a document for each row": Edit(
        "shardformer.attention.packed_documents",
        "falls = (steps != 1) & (positions[:, 1:] == least)",
        "falls = (steps == 0) & (positions[:, 1:] == least)",
        (f"{_SHARDFORMER}/attention/test_flash_attn.py::test_it_is_told_of_documents_in_several_rows[Llama]",),
    ),
    "documents on torch's flash kernel forget the window": Edit(
        "shardformer.attention.backend",
        "window = (before, 0 if causal else before)",
        "window = (-1, 0 if causal else -1)",
        (f"{_SHARDFORMER}/attention/test_flash_attn.py::{_WITHOUT_PACKAGE}[Mistral-True]",),
    ),
    "scores of uneven heads padded in front": Edit(
        "shardformer.attention.registry",
        "(0, 0, 0, 0, 0, most - heads)",
        "(0, 0, 0, 0, most - heads, 0)",
        (f"{_SHARDFORMER}/test_generation.py::test_further_ways_to_generate_with_heads_that_ranks_share_unevenly",),
    ),
    # context_parallel
    "queries meet the later chunk of earlier ranks": Edit(
        "shardformer.context_parallel.attention",
        "Block(everything, slice(0, chunk))",
        "Block(everything, slice(chunk, None))",
        (f"{_ZIGZAG}::test_a_criterion_sees_whole_sequences",),
    ),
    "queries behind the keys of a span see further ones": Edit(
        "shardformer.context_parallel.attention",
        "min(start, keys.stop)",
        "start",
        (f"{_SHARDFORMER}/context_parallel/test_attention.py::test_pairs_computed_are_pairs_needed",),
    ),
    "positions counted from the start of a part": Edit(
        "shardformer.context_parallel.zigzag",
        '"position_ids": axis.take(whole, dim=-1)',
        '"position_ids": whole[..., : 2 * axis.chunk(length)]',
        (f"{CONTEXT}[gpt2-lm_head-cp2pp2-zero1-momentum-clip]",),
    ),
    "blocks merged without rescaling": Edit(
        "shardformer.context_parallel.ring",
        "found.mul_((logs - safe).exp()[..., None]).add_(",
        "found.add_(",
        (f"{CONTEXT}[llama-causal_lm-cp2-zero1-momentum-clip]",),
    ),
    "gradient of keys that travelled here dropped": Edit(
        "shardformer.context_parallel.ring",
        "grad_held += ring.received(travelling)",
        "ring.received(travelling)",
        (f"{CONTEXT}[llama-causal_lm-cp2-zero1-momentum-clip]",),
    ),
    "packed documents of a cut sequence see each other": Edit(
        "shardformer.context_parallel.attention",
        "found = found & (documents(q) == documents(k))",
        "found = found & (documents(q) > -1)",
        (f"{_ZIGZAG}::test_packed_documents_do_not_see_each_other",),
    ),
    "parts gathered in the order of ranks": Edit(
        "shardformer.context_parallel.zigzag",
        "return held.argsort()[:length]",
        "return held.sort().values[:length]",
        (f"{_ZIGZAG}::test_a_criterion_sees_whole_sequences",),
    ),
    # expert_parallel
    "rows come back in the order of experts": Edit(
        "shardformer.layers.experts",
        "_ReturnedRows.apply(back, order, places, skips)",
        "_ReturnedRows.apply(back, order, order, skips)",
        (f"{EXPERTS}[{_MIXTRAL}]",),
    ),
    "routing weights of the other choice": Edit(
        "shardformer.layers.experts",
        "torch.bmm(weights.unsqueeze(1), pairs)",
        "torch.bmm(weights.flip(1).unsqueeze(1), pairs)",
        (f"{EXPERTS}[{_MIXTRAL}]",),
    ),
    "an expert takes one token too many": Edit(
        "shardformer.layers.experts",
        "place < limit",
        "place <= limit",
        (f"{CAPACITY}[{_CROWDED}]",),
    ),
    "capacity forgets that tokens have several choices": Edit(
        "shardformer.layers.experts",
        "self._length * num_choices / self.num_experts",
        "self._length / self.num_experts",
        (f"{CAPACITY}[{_CROWDED}]",),
    ),
    # cross_entropy, loss
    "softmax over the vocabulary of one rank": Edit(
        "shardformer.cross_entropy.vocab_parallel",
        "    dist.all_reduce(total, group=group)\n",
        "",
        (f"{PARITY}[llama-causal_lm-tp2-zero1]",),
    ),
    "gradient where labels are ignored": Edit(
        "shardformer.cross_entropy.vocab_parallel",
        "probabilities.mul_((counted * grad).unsqueeze(-1))",
        "probabilities.mul_(grad.unsqueeze(-1))",
        (f"{PARITY}[llama-causal_lm-tp2-zero1]",),
    ),
    "cross-entropy in 16 bit": Edit(
        "shardformer.cross_entropy.vocab_parallel",
        "return logits if logits.dtype == torch.float64 else logits.float()",
        "return logits",
        (f"{_CROSS_ENTROPY}_is_computed_in_fp32_at_least[dtype1]",),
    ),
    "gradient of the head from the last chunk": Edit(
        "shardformer.cross_entropy.fused_linear",
        ".addmm_(grad_logits.t(), hidden)",
        ".addmm_(grad_logits.t(), hidden, beta=0)",
        (f"{_FUSED}[1]",),
    ),
    "maxima of ranks not aligned": Edit(
        "shardformer.cross_entropy.fused_linear",
        "(totals * (peaks - highest).exp()).sum(dim=0).log()",
        "totals.sum(dim=0).log()",
        (f"{_FUSED}[22]",),
    ),
    "label behind the end of a sequence": Edit(
        "shardformer.loss.text",
        "value=IGNORE_INDEX if ignored is None else int(ignored)",
        "value=0 if ignored is None else int(ignored)",
        (f"{PARITY}[llama-causal_lm-dp2-zero1]",),
    ),
    "start and end of an answer count twice": Edit(
        "shardformer.loss.text",
        "weight=0.5, keywords=(DIVISOR,)",
        "weight=1.0, keywords=(DIVISOR,)",
        (f"{HEADS}[bert-question_answering-dp2-zero1-num_microbatches=2]",),
    ),
    "several labels of a sample count once": Edit(
        "shardformer.loss.text",
        "torch.full((), labels.numel(), device=labels.device)",
        "torch.full((), len(labels), device=labels.device)",
        (f"{HEADS}[bert-multi_label-dp2-zero1-num_microbatches=2]",),
    ),
    "routers balance padding too": Edit(
        "shardformer.loss.terms",
        "mask = None if mask is None else gather(mask.reshape(-1))[None]",
        "mask = None",
        (f"{_ROUTERS}[2-options3]",),
    ),
    "heads of the first rank's bias on every rank": Edit(
        "shardformer.distributed.sequence_parallel",
        "bias.narrow(1, self.rank * heads, heads)",
        "bias.narrow(1, 0, heads)",
        (f"{PARITY}[bloom-causal_lm-tp2-zero1-fp32-{_ULYSSES}]",),
    ),
    "rows of left padding as the kernel has them": Edit(
        "shardformer.attention.own_attention",
        "torch.where(blind.transpose(1, 2), even.transpose(1, 2), found)",
        "found",
        (f"{PARITY}[bloom-causal_lm-tp2-zero1-fp32-{_ULYSSES}]",),
    ),
    "bias of an activation added twice": Edit(
        "shardformer.transforms.operator_fusion",
        "    layer.adds_bias = False\n",
        "",
        (f"{PARITY}[opt-causal_lm-tp2pp2-zero1-sp-num_microbatches=2-{_KERNELS}-enable_jit_fused=True]",),
    ),
    # policies, stages
    "biases of the first heads on every rank": Edit(
        "shardformer.policies.module_edits",
        "first = dist.get_rank(group) * local_heads",
        "first = 0",
        (f"{PARITY}[bloom-causal_lm-tp4-zero1-fp32-{_KERNELS}-enable_jit_fused=True]",),
    ),
    "gathered input reduced twice": Edit(
        "shardformer.policies.rules",
        "is_gathered = self.config.gathers_sum and not reads_whole",
        "is_gathered = False",
        (f"{PARITY}[bert-masked_lm-tp2-zero1-sp]",),
    ),
    "norm of heads learns from one rank": Edit(
        "shardformer.policies.rules",
        "[_replace(suffix, target, {}, partial_gradient=True) for suffix in suffixes]",
        "[_replace(suffix, target, {}) for suffix in suffixes]",
        (f"{PARITY}[qwen3-causal_lm-tp4-zero1-fp32-{_KERNELS}-enable_jit_fused=True]",),
    ),
    "fused query, key and value cut as one": Edit(
        "shardformer.layers.linear",
        "    part_size = part_size or features\n",
        "    part_size = features\n",
        (f"{PARITY}[gpt2-lm_head-tp2-zero1]",),
    ),
    "position bias does not travel to the next stage": Edit(
        "shardformer.stages.placeholders",
        "carried = [joined_blocks(self.inputs.get(name, args, kwargs), 1) for name in self.carried_inputs]",
        "carried = [None for _ in self.carried_inputs]",
        (f"{PARITY}[t5-generation-tp2pp2-zero1-sp-fp32-num_microbatches=2-{_KERNELS}-enable_jit_fused=True]",),
    ),
    "keys and values of earlier stages do not arrive": Edit(
        "shardformer.stages.placeholders",
        "inputs[name][key] = (first, second)",
        "inputs[name][key] = (second, first)",
        (f"{_MESSAGES}[_gemma4-options0]",),
    ),
    "outputs of earlier modules do not travel": Edit(
        "shardformer.stages.earlier_modules",
        "received = iter(kept)",
        "received = iter(torch.zeros_like(each) for each in kept)",
        (f"{_MESSAGES}[_funnel-options3]",),
    ),
    "a stage does not read what arrived": Edit(
        "shardformer.stages.placeholders",
        "{inputs.names[0]: stage_input.hidden, **{name:",
        "{**{name:",
        (f"{PARITY}[gpt2-lm_head-pp2-zero1]",),
    ),
    "pixels without a class count": Edit(
        "shardformer.loss.perception",
        "else (labels != ignored).sum()",
        "else (labels != -100).sum()",
        (
            f"{_SHARDFORMER}/loss/test_heads.py::test_shares_of_what_a_forward_counts_add_up[DPTForSemanticSegmentation]",
        ),
    ),
    "loss of a detector's boxes weighted by images": Edit(
        "shardformer.loss.perception",
        '    return torch.tensor(float(sum(len(target["class_labels"]) for target in labels)))\n',
        "    return torch.tensor(float(len(labels)))\n",
        (f"{_SHARDFORMER}/loss/test_detection.py::test_parts_add_up_to_the_whole[lw_detr-LwDetrForObjectDetection]",),
    ),
}
