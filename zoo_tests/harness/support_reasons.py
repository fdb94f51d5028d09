"""Why a cell of the support page reads "no": families and column -> one sentence.

A cell without a proof and without a sentence here fails the page's test, and so does a sentence whose cell is proved.
"""

from __future__ import annotations

# (families, columns, sentence)
_TABLE: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (
        ("gpt_neo",),
        ("all-to-all", "attention backends"),
        "The model masks scores twice, by a window and by the causal mask, and rows of left padding then spread over "
        "their window only; no kernel gives these rows the same values, and the loss of the first token reads them.",
    ),
    (
        ("deberta_v2", "deberta_v2_convolved"),
        ("split-gather", "all-to-all"),
        "The same projections read the sequence and a table of relative positions, so that the gradients of their "
        "inputs are of two kinds: of a slice, and of a whole table.",
    ),
    (
        ("prophetnet", "cpmant"),
        ("attention backends",),
        "The model computes attention in its own code, between several streams or with boolean masks that it applies "
        "before and after the softmax, which no kernel does.",
    ),
    (
        ("sam", "swin", "swinv2"),
        ("split-gather", "all-to-all"),
        "Tokens lie on a grid that each layer partitions into windows between norm and attention; a slice of the "
        "sequence is not made of whole windows.",
    ),
    (
        ("prophetnet",),
        ("split-gather", "all-to-all"),
        "The decoder computes several streams of predictions that attend to each other in its own code.",
    ),
    (
        ("cpmant",),
        ("split-gather", "all-to-all"),
        "Every layer adds a position bias [batch, heads, seq, seq] in its own code, which the plan keeps on each rank.",
    ),
    (
        ("cpmant",),
        ("fused norms", "fused operators", "recomputation"),
        "The family has norms and gated activations of its own without biases, and its layers write the key/value "
        "cache in the forward pass, so that a second run would write it twice.",
    ),
    (
        ("falcon", "falcon_multi_query"),
        ("fused operators",),
        "The linear layers have no biases, so that there is one elementwise operator between two products, and nothing "
        "to fuse it with.",
    ),
    (
        ("mixtral", "qwen3_moe"),
        ("fused operators",),
        "The gated product is inside the stacked experts, whose kernel is that of transformers.",
    ),
)

REASONS = {(family, column): text for families, columns, text in _TABLE for family in families for column in columns}
SENTENCES = list(dict.fromkeys(text for _, _, text in _TABLE))
