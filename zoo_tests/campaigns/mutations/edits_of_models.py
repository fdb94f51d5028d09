"""Mutants that change one line of the boosted model: what scripts read of it, do to it and generate by it."""

from __future__ import annotations

from zoo_tests.campaigns.mutations.edits import Edit

_BOOSTED = "plugins.hybrid_parallel.boosted"
_LOOP = "zoo_tests/parity/test_pipeline_loop.py"
_SENT = f"{_LOOP}::test_no_output_is_sent_before_it_is_read"
_ROW = "zoo_tests/hybrid_parallel/boosted/test_surface.py::test_each_row_of_the_table"

EDITS_OF_MODELS: dict[str, Edit] = {
    "attributes stay on the wrapper": Edit(
        f"{_BOOSTED}.model_api",
        "            setattr(self.module, name, value)  #",
        "            super().__setattr__(name, value)  #",
        (f"{_ROW}[attributes-tp2]", f"{_ROW}[attributes-pp2]"),
    ),
    "copies share the weights of their model": Edit(
        f"{_BOOSTED}.model",
        "parameter_like(parameter, parameter.detach().clone())",
        "parameter_like(parameter, parameter.detach())",
        (f"{_ROW}[deepcopy-tp2]", f"{_ROW}[AveragedModel-pp2]"),
    ),
    "every micro-batch has the first one's gradients of outputs": Edit(
        "plugins.hybrid_parallel.step.outputs",
        "grad.tensor_split(self.num_microbatches)[self.index]",
        "grad.tensor_split(self.num_microbatches)[0]",
        (f"{_LOOP}::test_two_trained_models_in_one_loss[2-options0]",),
    ),
    "all outputs sent with the loss": Edit(
        "plugins.hybrid_parallel.step.user_loop",
        "outputs[LOSS] = self.model.user_loop.loss_over_replicas(self._fetch_loss())",
        "outputs[LOSS] = self.model.user_loop.loss_over_replicas([self.fetch(name) for name in self._header][0])",
        (_SENT,),
    ),
    "outputs sent again at each read": Edit(
        "plugins.hybrid_parallel.step.outputs",
        "            self[key] = value\n        return value\n\n    def __getattr__",
        "            self.keys()\n        return value\n\n    def __getattr__",
        (_SENT,),
    ),
    "logits of the first position of a prompt": Edit(
        f"{_BOOSTED}.stage_generation",
        "logits[:, -1:]",
        "logits[:, :1]",
        ("zoo_tests/parity/test_generation_options.py::test_what_scripts_pass_to_generate[t5-pp2]",),
    ),
    "a stage counts every other stage's keys in full": Edit(
        f"{_BOOSTED}.stage_generation",
        "torch.ones(size[0], 1, size[1], 1, dtype=torch.bool, device=device)",
        "torch.ones(size[0], 4, size[1], 12, device=device)",
        ("zoo_tests/parity/test_generation_options.py::test_a_stage_caches_its_own_layers_alone[pp2]",),
    ),
}
