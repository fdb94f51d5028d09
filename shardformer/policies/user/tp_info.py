"""TPInfo: tensor parallelism described by module names, for any model, without a policy file.

The interface follows ATorch's manual tensor parallelism (`TPInfo`, `shard_col`, `shard_row`, `shard_vocab`, ...).
The rules stand for a plan of styles, as that of a family; the sharding engine does the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# Arguments of a layer that a rule accepts. Harmless arguments that have no effect here are accepted and ignored.
_LAYER_ARGUMENTS = {
    "shard_col": ("stride", "gather_output", "num_heads", "async_grad_allreduce"),
    "shard_row": ("input_is_parallel", "num_heads"),
    "shard_vocab": (),
}
Rule = str | Mapping[str, Mapping[str, Any]]


class TPInfo:
    """Tensor-parallel sharding rules for modules, matched by the end of their names.

    The rule "mlp.c_fc" matches this name and all names that end in ".mlp.c_fc"; `*` matches any number, as in
    "h.*.attn". Methods return the object, so that calls can be chained.

    Example:
        ```python
        TPInfo().shard_col({"attn.c_attn": {"stride": 3}}, "mlp.c_fc").shard_row("attn.c_proj", "mlp.c_proj")
        ```
    """

    def __init__(self) -> None:
        self.rules: dict[str, dict[str, Any]] = {
            kind: {}
            for kind in (*_LAYER_ARGUMENTS, "replic_drop", "parallel_drop", "shrink", "partial_grad", "replicated")
        }

    def __repr__(self) -> str:
        said = (f"{kind}={_in_order(rules)}" for kind, rules in self.rules.items() if rules)
        return f"TPInfo({', '.join(said)})"

    def shard_col(self, *rules: Rule) -> TPInfo:
        """Shard the output features of linear layers.

        Arguments of a layer, {name: {...}}: `stride`, the number of fused projections (3 for a fused query, key and
        value), each sharded independently; `gather_output`; `num_heads`, the number of heads, which are not split.
        """
        return self._add("shard_col", rules)

    def shard_row(self, *rules: Rule) -> TPInfo:
        """Shard the input features of linear layers; outputs are summed over ranks, then the bias is added.

        Arguments of a layer, {name: {...}}: `input_is_parallel=False` if its input is not sharded; `num_heads`.
        """
        return self._add("shard_row", rules)

    def shard_vocab(self, *rules: Rule) -> TPInfo:
        """Shard the rows of embeddings, and the heads that are tied to them."""
        return self._add("shard_vocab", rules)

    def replic_drop(self, *names: str) -> TPInfo:
        """Declare dropouts of replicated activations: all tensor-parallel ranks use the same mask."""
        return self._add("replic_drop", names)

    def parallel_drop(self, *names: str) -> TPInfo:
        """Declare dropouts of sharded activations: each tensor-parallel rank draws its own mask."""
        return self._add("parallel_drop", names)

    def shrink(self, attributes: Mapping[str, str | Iterable[str]]) -> TPInfo:
        """Divide integer attributes of modules by the number of ranks: {name: {attribute, ...}}.

        An empty set declares that the attributes of a module are correct for a rank's share as they are.

        Raises:
            ValueError: `attributes` is not a mapping.
        """
        if not isinstance(attributes, Mapping):
            raise ValueError(f"shrink({attributes!r}) names no attributes; use shrink({{'attn': {{'num_heads'}}}})")
        for name, wanted in attributes.items():
            wanted = {wanted} if isinstance(wanted, str) else set(wanted)
            self.rules["shrink"][name] = self.rules["shrink"].get(name, set()) | wanted
        return self

    def partial_grad(self, *names: str) -> TPInfo:
        """Declare replicated modules that process sharded activations (per-head norms): gradients are summed."""
        return self._add("partial_grad", names)

    def replicated(self, *names: str) -> TPInfo:
        """Declare modules next to sharded layers replicated: every rank computes the same with them."""
        return self._add("replicated", names)

    def is_vocab_parallelled(self) -> bool:
        """Return whether any embedding is sharded."""
        return bool(self.rules["shard_vocab"])

    def _add(self, kind: str, rules: Iterable[Rule]) -> TPInfo:
        for rule in rules:
            takes_arguments = kind in _LAYER_ARGUMENTS
            if not isinstance(rule, str) and not (takes_arguments and isinstance(rule, Mapping)):
                form = "a name or {name: {argument: value}}" if takes_arguments else "a name"
                raise ValueError(f"{kind}({rule!r}) is no rule; use {form}")
            for name, arguments in ({rule: {}} if isinstance(rule, str) else rule).items():
                self.rules[kind][name] = dict(arguments)
                for argument in arguments:
                    if argument not in _LAYER_ARGUMENTS[kind]:
                        known = ", ".join(_LAYER_ARGUMENTS[kind]) or "none"
                        raise ValueError(f"{kind} knows no argument '{argument}' of {name}; use one of: {known}")
        return self


def _in_order(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Sort the rules, so that their text is the same on every rank: sets have no order."""
    return {name: sorted(said) if isinstance(said, set) else said for name, said in sorted(rules.items())}
