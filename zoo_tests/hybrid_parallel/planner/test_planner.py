"""The planner's arithmetic: links, layouts, bubbles, in-flight activations, ranking and reasons.

What breaks here first: a formula. Look in `plugins/hybrid_parallel/planner/`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelConfig, HybridParallelPlugin
from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES, Kind
from plugins.hybrid_parallel.pipeline.timeline import simulate
from plugins.hybrid_parallel.planner import op_recorder
from plugins.hybrid_parallel.planner.calibrate import Case, MeasuredParts, PartTimes
from plugins.hybrid_parallel.planner.costs import TooLarge
from plugins.hybrid_parallel.planner.device import PRESETS, Link, preset
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.op_recorder import FlopCounter
from plugins.hybrid_parallel.planner.plan import Job, Space, plan_for, search
from plugins.hybrid_parallel.planner.predict import Predictor
from plugins.hybrid_parallel.planner.profile import Profiler, _of_rank
from plugins.hybrid_parallel.planner.rank_memory import peak_activations
from plugins.hybrid_parallel.planner.report import draw, to_json, to_text, utilization
from plugins.hybrid_parallel.planner.stage_map import ModelMap
from shardformer.cross_entropy import fused_linear

_LENGTH = 64


def _build(layers: int = 8, hidden: int = 128, **options: int) -> partial:
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1000,
        **options,
    )
    return partial(LlamaForCausalLM, config)


def _predictor(layers: int = 8, **measured: object) -> Predictor:
    build = _build(layers)
    return Predictor(ModelMap(build), Profiler(build, _LENGTH, PRESETS["A100"], "bf16", **measured))


def test_collectives_over_a_ring() -> None:
    link = Link(latency=2.0, bandwidth=10.0)
    assert link.collective("all_gather", 40.0, 4) == 3 * (2.0 + 1.0)
    assert link.collective("reduce_scatter", 40.0, 4) == 3 * (2.0 + 1.0)
    assert link.collective("all_reduce", 40.0, 4) == 6 * (2.0 + 1.0)
    assert link.collective("send", 40.0, 2) == 2.0 + 4.0
    assert link.collective("all_reduce", 40.0, 1) == 0.0


def test_one_rank_of_a_machine_sends_to_the_next() -> None:
    """The ranks of a CPU machine share its network; a ring through all of them crosses it once."""
    here = replace(PRESETS["H100"], name="this-machine", node_size=2)
    assert here.ring(2, 1) == here.inside
    assert here.ring(2, 2) == here.between
    assert here.ring(4, 1).bandwidth == 2 * here.between.bandwidth
    gpu = PRESETS["H100"]
    assert gpu.ring(16, 8) == gpu.ring(16, 1, has_all_adapters=False) == gpu.between, "each GPU has an adapter"
    assert gpu.ring(16, 4).bandwidth == 2 * gpu.between.bandwidth, "NCCL has a ring for each of them"
    assert gpu.ring(16, 1).bandwidth == 8 * gpu.between.bandwidth <= gpu.inside.bandwidth
    near, far = gpu.inside, gpu.between
    assert gpu.all_to_all(64.0, 8, 1) == near.latency + 7 * 8.0 / near.bandwidth, "all messages at once"
    assert gpu.all_to_all(64.0, 16, 1) == far.latency + 8 * 4.0 / far.bandwidth, "half of them stay on the machine"
    assert gpu.all_to_all(64.0, 16, 8) == far.latency + 15 * 4.0 / far.bandwidth


def test_small_products_are_less_efficient() -> None:
    device = PRESETS["H100"]
    peak = device.peak("fp8")
    full = peak * device.matmul_efficiency
    assert peak == device.flops["bf16"], "attention and heads are not in 8 bit"
    assert device.matmul_seconds(device.matmul_half, 0.0, peak) == pytest.approx(2 * device.matmul_half / full)
    assert device.matmul_seconds(1e15, 0.0, peak) == pytest.approx(1e15 / full, rel=0.01)
    assert device.matmul_seconds(1.0, 1e9, peak) == pytest.approx(1e9 / device.bandwidth)


@pytest.mark.slow
def test_nothing_hides_the_first_gather_of_a_pass_and_masters_cost_traffic() -> None:
    device, build = replace(PRESETS["H100"], overlap=1e9), _build(2)
    seconds = {}
    for precision in ("fp32", "bf16"):
        predictor = Predictor(ModelMap(build), Profiler(build, _LENGTH, device, precision))
        layout = Layout(2, 1, 1, num_microbatches=3, zero_stage=3, precision=precision)
        (states,) = predictor._place(layout).states
        *_, last = first, *_ = states.held.units("tp").values()
        seconds[precision] = predictor.predict(layout).seconds
        hidden = sum(device.inside.collective("all_gather", size, 2) for size in (first, last))
        assert seconds[precision].gathers == pytest.approx(3 * hidden)
    assert seconds["bf16"].optimizer == pytest.approx(seconds["fp32"].optimizer * (32 + 18) / 32)


def test_presets_and_what_the_user_knows_better() -> None:
    assert preset("h200", memory=1e9).memory == 1e9
    with pytest.raises(ConfigurationError, match="no device 'V100' is known; use A100, H100, H200, B200 or this-machi"):
        preset("V100")


@pytest.mark.slow
@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_simulated_bubbles_equal_the_closed_formulas(p: int) -> None:
    """In units of a rank's forward pass with F = I = W = 1 (docs/pipelines.md), for all m up to 64 and v up to 4."""
    times = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}

    def bubble(name: str, m: int, v: int) -> float:
        schedule = SCHEDULES[name]
        tables = [schedule.actions(rank, p, m, v) for rank in range(p)]
        return simulate(tables, lambda action: times[action.kind] / v).length - 3 * m

    for m in range(2 * p, 65, p):
        assert bubble("1f1b", m, 1) == bubble("gpipe", m, 1) == 3 * (p - 1)
        for v in (2, 3, 4):
            assert bubble("interleaved", m, v) == pytest.approx(3 * (p - 1) / v)
            assert bubble("zero_bubble", m, v) == pytest.approx((p - 1) / v)
        assert bubble("zbv", m, 2) == bubble("dualpipev", m, 2) == pytest.approx((p - 1) / 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("style", "chunks", "m"), [("1f1b", 1, 40), ("interleaved", 2, 36), ("zbv", 2, 41), ("zero_bubble", 2, 50)]
)
def test_long_pipelines_go_on_as_they_began(style: str, chunks: int, m: int) -> None:
    predictor = _predictor()
    layout = Layout(1, 1, 4, pp_style=style, num_chunks=chunks, num_microbatches=m)
    schedule, costs = SCHEDULES[style], predictor._place(layout).costs
    tables = [schedule.actions(rank, 4, m, chunks) for rank in range(4)]
    link = PRESETS["A100"].inside
    send = link.latency + max(cost.output for cost in costs) / link.bandwidth
    whole = simulate(tables, lambda action: costs[action.stage].seconds[action.kind], lambda a, b: send).length
    seconds = predictor.predict(layout).seconds
    assert seconds.compute + seconds.comm + seconds.bubble == pytest.approx(whole, rel=1e-9)


def test_activations_in_flight() -> None:
    assert [max(each) for each in peak_activations("1f1b", 4, 16, 1)] == [(4, 0), (3, 0), (2, 0), (1, 0)]
    assert [max(each) for each in peak_activations("gpipe", 4, 16, 1)] == [(16, 0)] * 4
    assert max(sum(each) for rank in peak_activations("zbv", 4, 16, 2) for each in rank) == 8


def test_layouts_cover_the_space_and_say_what_they_leave_out() -> None:
    space = Space(8, 12, "bf16", num_layers=3, largest_tp=4)
    layouts = list(space.layouts())
    assert {(each.dp_size, each.tp_size, each.pp_size) for each in layouts} == {
        (4, 2, 1), (4, 1, 2), (2, 4, 1), (2, 2, 2), (1, 4, 2)
    }  # fmt: skip
    assert all(each.world_size == 8 for each in layouts)
    assert all(each.rows * each.num_microbatches * each.dp_size == 12 for each in layouts)
    assert space.left_out() == [("dp8 tp1 pp1", "a global batch of 12 samples does not divide by dp_size=8")]
    assert {each.pp_style for each in layouts if each.pp_size == 2} == {"1f1b", "gpipe", "zero_bubble"}


def test_a_layout_is_what_the_plugin_reads(tmp_path: Path) -> None:
    layout = Layout(2, 2, 2, sequence=True, pp_style="interleaved", num_chunks=2, num_microbatches=4, recomputation=0.5)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(layout.description()))
    config = HybridParallelPlugin.from_config(path).config
    assert config == layout.config
    expected = {"tp_size": 2, "pp_size": 2, "num_microbatches": 4, "precision": "bf16"}
    assert config.options().items() >= expected.items()


@pytest.mark.slow
def test_a_step_adds_up() -> None:
    """Twice the layers take twice the time of the layers, and three passes of products are the model's work."""
    few, many = _predictor(4), _predictor(8)
    layout = Layout(1, 1, 1, rows=2)
    parts = few.parts(layout)
    (layer,) = {parts[part].forward + parts[part].backward for part in parts if part == ("layer", 0, 1)}
    grown = many.predict(layout).seconds.compute - few.predict(layout).seconds.compute
    assert grown == pytest.approx(4 * layer)
    hidden, tokens = 128, 2 * _LENGTH
    matrices = 8 * (hidden * hidden * (1 + 0.5 + 0.5 + 1) + 3 * 3 * hidden * hidden) + 1000 * hidden
    attention = 8 * 2 * _LENGTH * hidden  # causal: half of 4 s h a token
    assert many.predict(layout).model_flops == pytest.approx(3 * tokens * (2 * matrices + attention), rel=1e-3)


@pytest.mark.slow
def test_a_loss_without_logits_is_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients are found in the forward pass, and none of them is put off."""
    layout = Layout(1, 1, 1, rows=2)
    with_logits, before = _predictor(4).parts(layout)["gap", 1], _predictor(4).predict(layout)
    monkeypatch.setattr(fused_linear, "saves_memory", lambda call: True)
    monkeypatch.setattr(fused_linear, "rows_of_chunk", lambda columns, device: 48)
    without, after = _predictor(4).parts(layout)["gap", 1], _predictor(4).predict(layout)
    assert after.model_flops == pytest.approx(before.model_flops)
    assert without.forward_peak + without.backward_peak < with_logits.forward_peak + with_logits.backward_peak
    assert without.weights == pytest.approx(0.0, abs=1e-3 * with_logits.weights) and with_logits.weights > 0


def test_recomputation_trades_memory_for_time() -> None:
    predictor = _predictor()
    none, half, operators, full = (
        predictor.predict(Layout(1, 1, 1, rows=4, recomputation=share)) for share in (None, 0.5, "operators", "full")
    )
    assert none.memory.activations > half.memory.activations > full.memory.activations
    assert none.memory.activations > operators.memory.activations > full.memory.activations
    assert none.seconds.total < half.seconds.total < full.seconds.total
    assert none.seconds.total < operators.seconds.total < full.seconds.total
    assert full.model_flops == none.model_flops


def test_replicas_share_optimizer_and_work() -> None:
    predictor = _predictor()
    one, four = predictor.predict(Layout(1, 1, 1, rows=4)), predictor.predict(Layout(4, 1, 1, rows=1))
    assert four.memory.optimizer == pytest.approx(one.memory.optimizer / 4, rel=0.01)
    assert four.memory.parameters == pytest.approx(one.memory.parameters, rel=0.01)
    assert one.seconds.reduction == 0 < four.seconds.reduction
    assert four.model_flops == pytest.approx(one.model_flops, rel=1e-6)


def test_looking_at_a_model_leaves_its_configuration_alone() -> None:
    build = _build()
    before = build.args[0].to_dict()
    Profiler(build, _LENGTH, PRESETS["A100"], "bf16").profile(1, False)
    assert build.args[0].to_dict() == before and build().model.config is build.args[0]


def test_sharing_sequences_computes_no_less_than_replicas() -> None:
    predictor = _predictor()
    replicas, context = (predictor.predict(layout).seconds for layout in (Layout(4, 1, 1), Layout(2, 1, 1, 2, rows=2)))
    assert context.compute == pytest.approx(replicas.compute) and context.comm > replicas.comm == 0


def test_measured_parts_take_the_place_of_worked_out_ones() -> None:
    times = PartTimes(forward=1.0, backward=2.0)
    names = [("gap", 0), ("gap", 1), ("layer", 0, 0), ("layer", 0, 1), ("layer", 0, 2)]
    measured = {
        Case(1, False, rows): MeasuredParts(
            {part: PartTimes(times.forward * rows, times.backward * rows) for part in names}, 0.0
        )
        for rows in (1, 4)
    }
    predictor = _predictor(8, rows=(1, 4), measured=measured)
    assert predictor.predict(Layout(1, 1, 1, rows=3)).seconds.compute == pytest.approx(3 * (1 + 2) * (8 + 2))


@pytest.mark.slow
def test_the_plan_is_ranked_and_everything_else_has_a_reason() -> None:
    build = _build(6)
    device = preset("A100", memory=24e6)
    predictor = Predictor(ModelMap(build), Profiler(build, _LENGTH, device, "bf16"))
    styles = (("1f1b", 1), ("zbv", 2))
    space = Space(16, 16, "bf16", num_layers=6, largest_tp=16, styles=styles, rows=(1, 4))
    plan = search(predictor, space, count=5)
    assert plan.ranked and plan.rejected
    assert len(plan.ranked) + len(plan.rejected) == len(list(space.layouts())) + len(space.left_out())
    best = [each.seconds.total for each in plan.ranked[:5]]
    assert best == sorted(best)
    assert all(each.memory.total <= device.memory for each in plan.ranked)
    assert {each.reason.split(" ")[0] for each in plan.rejected} == {"needs", "tp_size=16"}
    assert any("tp_size=16 does not divide num_attention_heads=8" in each.reason for each in plan.rejected)
    text = to_text(plan, device, 16 * _LENGTH, 3)
    assert f"{len(plan.ranked)} layouts fit, {len(plan.rejected)} do not" in text
    table = to_json(plan, device, 16 * _LENGTH)
    assert json.loads(json.dumps(table))["layouts"][0]["memory_bytes"]["total"] == plan.ranked[0].memory.total
    assert 0 < utilization(plan.ranked[0], device) < 1


def test_a_layout_that_is_too_large_says_where() -> None:
    with pytest.raises(TooLarge, match=r"needs .* of 1 MiB on rank 1 of the pipeline: parameters .*, temporary "):
        _predictor().predict(Layout(1, 1, 2, num_microbatches=2), limit=2**20)


@pytest.mark.slow
def test_bars(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = search(_predictor(4), Space(2, 4, "bf16", num_layers=4), count=2)
    draw(plan, PRESETS["A100"], tmp_path / "plan.png", "a plan", 4)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_products_in_8_bit() -> None:
    """Each input is rounded once, and each weight for the whole step, which keeps both orders of its values.

    What ranks gather, weights under ZeRO stage 3 and tokens, is in 8 bit, too.
    """
    build, found, whole, tokens = _build(2), {}, {}, {}
    for precision in ("bf16", "fp8"):
        predictor = Predictor(ModelMap(build), Profiler(build, _LENGTH, PRESETS["H100"], precision))
        memory = predictor.predict(Layout(1, 1, 1, precision=precision)).memory
        found[precision] = memory, predictor.profile(1, False).records[0]["layer", 0, 0].forward.operators
        whole[precision] = predictor.predict(Layout(2, 1, 1, zero_stage=3, precision=precision)).memory.gathered
        cut = predictor.profile(2, True).records[0]["layer", 0, 0]
        sent = [size for each in (cut.forward, cut.backward) for kind, size in each.collectives if kind == "all_gather"]
        tokens[precision] = sum(sent)
    (bf16, native), (fp8, rounded) = found.values()
    assert whole["bf16"] - whole["fp8"] == 2 * 128 * (128 + 2 * 64 + 128 + 3 * 384), "a byte of each value, not two"
    assert tokens["bf16"] == 2 * tokens["fp8"] > 0
    weights = 2 * 128 * (128 + 2 * 64 + 128 + 3 * 384)  # of both layers
    assert fp8.parameters - bf16.parameters == 2 * weights + 4 * 2 * 7, "and a scale for each"
    assert [each.is_8_bit for each in rounded if each.kind == "matmul"] == [True] * 7
    assert len(rounded) - len(native) == 4 + 7, "inputs of attention and feed-forward, of their last products; weights"
    job = Job(1, 1, _LENGTH, "fp8")
    with pytest.raises(
        ConfigurationError, match="^precision='fp8' needs products in 8 bit, which A100 has not; use .*'bf16'$"
    ):
        plan_for(build, job, PRESETS["A100"])


def test_values_of_another_width_than_keys_have_no_scores() -> None:
    config = DeepseekV3Config(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=1000, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
        first_k_dense_replace=2,
    )  # fmt: skip
    profile = Profiler(partial(DeepseekV3ForCausalLM, config), _LENGTH, PRESETS["H100"], "bf16").profile(1, False)
    record = profile.records[0]["layer", 0, 0]
    (forward,) = [each for each in record.forward.operators if each.kind == "attention"]
    assert forward.is_causal and forward.flops == 4 * _LENGTH**2 * (24 + 16), "two products, half of the pairs"
    assert [each.kind for each in record.backward.operators].count("attention") == 1


def test_long_rows_in_tiles_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have many operators, but no more for each token, as models have that scan tokens one by one."""
    monkeypatch.setattr(op_recorder, "MOST_OPERATORS", 1000)
    tiled = Profiler(_build(2), 4 * 128, PRESETS["H100"], "bf16", kernels=("tiled_mlp",)).profile(1, False)
    products = [each for each in tiled.records[0]["layer", 0, 0].forward.operators if each.kind == "matmul"]
    assert len(products) == 4 + 3 * 4, "of attention, and of four tiles"


def test_sinks_have_no_scores_where_the_kernel_of_torch_runs() -> None:
    """GPT-OSS: a layer with a window of 16 tokens, and one without."""
    config = GptOssConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=1000, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
    )  # fmt: skip
    kernels = ("enable_flash_attention",)
    profiler = Profiler(partial(GptOssForCausalLM, config), _LENGTH, PRESETS["H100"], "bf16", kernels=kernels)
    records = profiler.profile(1, False).records[0]
    for kind, pairs in ((0, 16 * _LENGTH), (1, _LENGTH**2 / 2)):
        record = records["layer", 0, kind]
        of_both = [
            [each.flops for each in one.operators if each.kind == "attention"]
            for one in (record.forward, record.backward)
        ]
        assert of_both == [[4 * 4 * 16 * pairs], [2.5 * 4 * 4 * 16 * pairs]]


def test_experts_that_do_not_fit_on_a_rank_are_shared() -> None:
    config = MixtralConfig(
        hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=1000, num_local_experts=8,
    )  # fmt: skip
    build = partial(MixtralForCausalLM, config)
    model = ModelMap(build)
    predictor = Predictor(model, Profiler(build, _LENGTH, PRESETS["A100"], "bf16"))
    alone = predictor.predict(Layout(8, 1, 1))
    shared = predictor.predict(Layout(8, 1, 1, ep_size=4))
    experts = 2 * 8 * 3 * 128 * 512  # of all layers
    assert alone.memory.parameters - shared.memory.parameters == pytest.approx(2 * experts * 3 / 4, rel=1e-3)
    # Two replicas have each expert in place of eight: a rank still has an eighth of all states.
    assert shared.memory.optimizer == pytest.approx(alone.memory.optimizer, rel=1e-3)
    # [tokens, k, hidden] in bf16, there and back, in both passes; and the numbers of rows.
    rows, link = _LENGTH * 2 * 128 * 2.0, PRESETS["A100"].inside
    sent = 5 * link.latency + 4 * rows * 3 / 4 / link.bandwidth
    assert shared.seconds.comm - alone.seconds.comm == pytest.approx(2 * sent)
    assert shared.model_flops == alone.model_flops

    stacked = [
        each for each in predictor.profile(1, False).records[0]["layer", 0, 0].forward.operators if each.of_experts
    ]
    assert [each.of_experts for each in stacked] == [8 * 2 * 512 * 128 * 2, 8 * 512 * 128 * 2], (
        "bytes that 8 ranks share"
    )
    assert [each.bytes - _of_rank(each, 4).bytes for each in stacked] == [each.of_experts * 3 / 4 for each in stacked]

    space = Space(8, 8, "bf16", 2, largest_tp=1, ep_sizes=tuple(model.ep_sizes), zero_stages=(1,), rows=(1,))
    small = predictor.within(0.9 * alone.memory.needed)
    best = search(small, replace(space, styles=())).ranked[0].layout
    assert model.ep_sizes == [1, 2, 4, 8] and best.ep_size > 1
    assert HybridParallelConfig.from_options(**best.options()).parallel.ep_size == best.ep_size
    assert f"ep{best.ep_size}" in str(best) and best.description()["ep_size"] == best.ep_size


def test_tiled_feed_forwards_hold_one_tile_between_their_products() -> None:
    length, build = 512, _build(2)
    plain, tiled = (Profiler(build, length, PRESETS["H100"], "bf16", kernels=each) for each in ((), ("tiled_mlp",)))
    before, after = (each.profile(1, False).at(1)["layer", 0, 0] for each in (plain, tiled))
    widened = length * 3 * 128 * 2  # bytes of [tokens, intermediate] in bf16
    assert before.saved - after.saved >= 4 * widened, "gate, up, activation and product"
    assert after.flops == before.flops
    assert after.backward_peak <= before.backward_peak
    layout = Layout(1, 1, 1, kernels=("tiled_mlp",))
    assert HybridParallelPlugin(**layout.options()).config.kernels.tiled_mlp


def test_attention_of_packed_documents_is_counted_like_that_of_rows() -> None:
    def flops(attend: Callable[[Tensor], Tensor], *shape: int) -> float:
        with FlopCounter() as counter:
            attend(torch.empty(*shape, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
        return counter.flops

    with FakeTensorMode():
        borders = torch.arange(0, 513, 128, dtype=torch.int32)
        options = {"window_size": (-1, 0)}
        packed = flops(lambda x: varlen_attn(x, x, x, borders, borders, 128, 128, **options), 512, 8, 64)
        rows = flops(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), 4, 8, 128, 64)
    assert packed == rows > 0


def test_lengths_beyond_the_model_are_refused_in_one_sentence() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    build = partial(GPT2LMHeadModel, GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=16))
    predictor = Predictor(ModelMap(build), Profiler(build, 32, PRESETS["A100"], "bf16"))
    with pytest.raises(
        ConfigurationError,
        match="samples of 32 tokens are longer than the 16 positions of GPT2LMHeadModel; use 16 or fewer",
    ):
        predictor.predict(Layout(1, 1, 1))


@pytest.mark.campaign
def test_a_model_of_405_billion_parameters_on_16384_devices() -> None:
    """Under 10 s on an idle laptop; the limit is of processor time, and wide, since other tests run meanwhile."""
    config = LlamaConfig(
        hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
    )  # fmt: skip
    build = partial(LlamaForCausalLM, config)
    began = time.process_time()
    model = ModelMap(build)
    predictor = Predictor(model, Profiler(build, 8192, PRESETS["H100"], "bf16"))
    plan = search(predictor, Space(16384, 2048, "bf16", model.num_layers))
    assert time.process_time() - began < 60
    assert model.num_parameters == 405_853_388_800
    best = plan.ranked[0]
    assert best.layout.tp_size == 8 and best.layout.pp_size > 1
    assert 0.2 < utilization(best, PRESETS["H100"]) < 0.6
