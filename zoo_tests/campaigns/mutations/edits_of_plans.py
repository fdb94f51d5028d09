"""Mutants of plans: rules for families and heads, and plans and stages that are proposed for models without either."""

from __future__ import annotations

from zoo_tests.campaigns.mutations.edits import Edit

_VERIFIED = "zoo_tests/hybrid_parallel/verify/test_kinds_of_heads.py::test_trains_as_plainly"
_PROPOSED = "zoo_tests/shardformer/policies/test_proposed.py"
_DIVIDED = "zoo_tests/parity/test_plans.py::test_slices_of_sequences_between_the_regions_of_a_plan"
_STATE_SPACES = "zoo_tests/shardformer/policies/test_state_space.py::test_divided_state_spaces"
_COMPLETION = "zoo_tests/shardformer/policies/test_completion.py"
_TOWERS = "zoo_tests/parity/test_plans.py::test_towers_of_images_and_sounds_are_divided"
_LEFT_WHOLE = "zoo_tests/parity/test_plans.py::test_what_a_plan_of_transformers_leaves_whole_is_divided"
_SWITCHES = "zoo_tests/parity/test_plans.py::test_parts_that_a_switch_adds"
_FEATURES = "zoo_tests/shardformer/policies/test_module_edits.py"
_ORDER = "zoo_tests/shardformer/policies/test_execution_order.py"

EDITS_OF_PLANS: dict[str, Edit] = {
    "sparse attention takes the entry for another kernel": Edit(
        "shardformer.attention.registry",
        "(self.entry == other or self.kernel == other)",
        "self.entry == other",
        (f"{_VERIFIED}[deepseek_v32-DeepseekV32ForCausalLM-options6]",),
    ),
    "an adapter's part of a rotary key keeps one rank's gradient": Edit(
        "shardformer.peft.shard",
        'if getattr(hook, "sees_adapters", False):',
        "if False:",
        ("zoo_tests/campaigns/test_hot_families.py::test_a_sample_is_exact[glm_moe_dsa-lora]",),
    ),
    # what a switch of a configuration adds
    "each rank's heads read the first norms of a list": Edit(
        "shardformer.policies.module_edits",
        "for norm in norms])[start:stop]",
        "for norm in norms])",
        (f"{_SWITCHES}[StableLmForCausalLM-switches0-layouts0]",),
    ),
    "norms of heads with a bias get the gradients of one rank's heads": Edit(
        "shardformer.policies.mixers",
        "if all(param.numel() == head_dim for param in norm.parameters())",
        "if [param.numel() for param in norm.parameters()] == [head_dim]",
        (f"{_SWITCHES}[PhiForCausalLM-switches2-layouts2]",),
    ),
    "the cut-off of a sparse activation is that of a rank's features": Edit(
        "shardformer.policies.mixers",
        'or not hasattr(owner, "_gaussian_topk"):',
        "or True:",
        (f"{_SWITCHES}[Gemma3nForCausalLM-switches4-layouts4]",),
    ),
    "shares of features count alike": Edit(
        "shardformer.policies.module_edits",
        "weights = means.new_tensor(shares)",
        "weights = means.new_tensor([1 / len(shares)] * len(shares))",
        (f"{_FEATURES}::test_statistics_of_uneven_shares",),
    ),
    "a feed-forward that mixes features is cut": Edit(
        "shardformer.policies.plans.policy",
        "        return bool(found)\n",
        "        return False\n",
        (f"{_FEATURES}::test_a_feed_forward_that_mixes_features_stays_whole",),
    ),
    # slices of sequences
    "the states of an encoder get one rank's gradient from the decoder's slices": Edit(
        "shardformer.policies.plans.sequence",
        "is_gathered = region.sums_gradients and not _reads_whole(owner, path, change)",
        "is_gathered = region.sums_gradients",
        (f"{_DIVIDED}[Speech2TextForConditionalGeneration]",),
    ),
    "embeddings that attention adds to a slice get one rank's gradient": Edit(
        "shardformer.policies.plans.sequence",
        " or (changes and _adds_positions(owner))",
        "",
        (f"{_DIVIDED}[DetrForObjectDetection]",),
    ),
    "norms between the regions of several modules keep one slice's gradient": Edit(
        "shardformer.policies.plans.sequence",
        "partial_gradient=config.cuts_sequence",
        "partial_gradient=False",
        (f"{_DIVIDED}[MegatronBertForMaskedLM]",),
    ),
    # proposed plans
    "a column whose features something else reads is cut": Edit(
        "shardformer.policies.plans.regions",
        "if not read & self.columns_of(row).keys() and self._agrees(row, rows)}\n",
        "if self._agrees(row, rows)}\n",
        (f"{_PROPOSED}::test_what_something_else_reads_too_is_no_column",),
    ),
    "halves that overlap count as independent": Edit(
        "shardformer.policies.plans.regions",
        "            return None if (halves[0] & halves[1]).any() else style\n",
        "            return style\n",
        (f"{_PROPOSED}::test_what_something_else_reads_too_is_no_column",),
    ),
    "a parameter that all heads use is taken for a rank's own": Edit(
        "shardformer.policies.plans.regions",
        "    if (first & second).any():\n        return PARTIAL\n",
        '    if (first & second).any():\n        return "replicate"\n',
        (f"{_PROPOSED}::test_the_regions_of_a_model_that_nobody_has_seen",),
    ),
    "who reads a mask is not looked for": Edit(
        "shardformer.policies.plans.execution",
        "        return ~tensor\n",
        "        return tensor\n",
        (f"{_ORDER}::test_each_part_is_found",),
    ),
    "a stage's first layer receives all of its inputs": Edit(
        "shardformer.policies.plans.execution",
        ' and names <= {""}',
        "",
        (f"{_ORDER}::test_what_only_the_next_layer_reads_travels",),
    ),
    "one output of a module that runs twice travels": Edit(
        "shardformer.policies.plans.execution",
        "if times[path] > 1 and path not in self.layers",
        "if times[path] > 2 and path not in self.layers",
        (f"{_ORDER}::test_each_part_is_found",),
    ),
    "a module ahead of its layer runs behind it": Edit(
        "shardformer.policies.plans.execution",
        "for is_after in (True, False)",
        "for is_after in (False, True)",
        (f"{_ORDER}::test_each_part_is_found",),
    ),
    "a part of a plan that differs stays": Edit(
        "plugins.hybrid_parallel.verify.propose",
        "        is_equal = compare(plain, [trace], tolerance).first is None\n",
        "        is_equal = trace is not None\n",
        ("zoo_tests/hybrid_parallel/verify/test_propose.py::test_a_part_that_differs_is_dropped",),
    ),
    "channels of queries, keys and values cut at once": Edit(
        "shardformer.policies.mixers",
        "return tuple(Part(getattr(owner, name)) for name in form.channels)",
        "return (Part(sum(getattr(owner, name) for name in form.channels)),)",
        (f"{_LEFT_WHOLE}[KimiLinearForCausalLM-0.9]",),
    ),
    "a mixer takes the kernel of all its parts": Edit(
        "shardformer.policies.mixers",
        "        module.training = False\n",
        "        pass\n",
        (f"{_STATE_SPACES}[one group]",),
    ),
    "gradients of shared time steps are partial": Edit(
        "shardformer.policies.mixers",
        "return copy_to_region(output, group)  # read",
        "return output  # read",
        (f"{_STATE_SPACES}[channels]",),
    ),
    "gradients of shared kernels are partial": Edit(
        "shardformer.policies.mixers",
        "        module_edits.sum_gradient_of_parameter(conv, name=name, group=group)\n",
        "        pass\n",
        (f"{_STATE_SPACES}[one group]",),
    ),
    "a norm over the features of one rank": Edit(
        "shardformer.layers.norm",
        "reduce_from_region(x.pow(2).sum(-1, keepdim=True), self.group)",
        "2 * x.pow(2).sum(-1, keepdim=True)",
        (f"{_STATE_SPACES}[one group, and a gate behind its norm]",),
    ),
    "a part is cut in a class that was not seen": Edit(
        "shardformer.policies.plans.plan",
        "if type(owner).__name__ not in (lookup(at, self.classes) or ()):",
        "if not lookup(at, self.classes):",
        (f"{_COMPLETION}::test_a_class_that_was_not_seen",),
    ),
    "heads of a tower are cut in two": Edit(
        "shardformer.policies.plans.plan",
        "    return heads % policy.tp_size == 0 or is_copied\n",
        "    return True\n",
        (f"{_COMPLETION}::test_heads_of_a_tower",),
    ),
    "an output projection stays whole behind its inputs": Edit(
        "shardformer.policies.plans.styles",
        ').get(path, "replicate")',
        ').get("", "replicate")',
        (f"{_TOWERS}[Glm5NextForConditionalGeneration-0.7]",),
    ),
    "a norm of experts reads a partial sum": Edit(
        "shardformer.policies.module_edits",
        "collectives.reduce_from_region(args[0].clone(), group)",
        "args[0].clone()",
        ("zoo_tests/shardformer/policies/test_module_edits.py::test_the_norm_of_an_expert_reads_whole_outputs[eager]",),
    ),
    "each rank adds the whole bias of experts": Edit(
        "shardformer.policies.module_edits",
        "module._parameters[name] / num_parts(group)",
        "module._parameters[name]",
        (f"{_LEFT_WHOLE}[OpenAIPrivacyFilterForTokenClassification-0.9]",),
    ),
}
