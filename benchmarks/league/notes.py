"""What each system was given, and why the wrong ones are wrong, in words that were checked by hand."""

from __future__ import annotations

import re

# System -> its settings; in the order of the tables.
SETTINGS = {
    "plain transformers": "control; the model's own loss, `loss.backward()` and SGD.",
    "ours with a fault": "control; as *ours*, and the largest gradient of a rank is 1 % too large.",
    "ours": "`HybridParallelPlugin(tp_size, pp_size, num_microbatches=pp_size)`; one micro-batch for models with batch "
    "norm.",
    "transformers tp_plan": '`from_pretrained` with `DistributedConfig(tp_size=2, tp_plan="auto")`; a class without a '
    "plan counts as refused. Weights that the class does not read back from its own folder are copied, so that they do "
    "not count against it.",
    "accelerate": "`Accelerator(parallelism_config=ParallelismConfig(tp_size=2)).prepare(model)` over the model that "
    "transformers shards by its plan.",
    "torch parallelize_module": "transformers' plan of the class, translated style by style; weights are tied again "
    "afterwards, since each module gets a parameter of its own. Styles that torch lacks are refused.",
    "torch pipelining (1 micro-batch)": "`torch.distributed.pipelining.pipeline()` traces the model with its loss and "
    "splits it in the middle of its layers; GPipe. It is traced without gradients, since `pipeline()` cannot unflatten "
    "the regions without gradients of rotary embeddings otherwise.",
    "torch pipelining": "as above with two micro-batches, whose losses its loss function weighs by their numbers of "
    "labels.",
    "DeepSpeed AutoTP": "DeepSpeed 0.19.8, `tp_model_init` and `initialize` with `autotp_size`; parts of parameters "
    "that it does not gather are concatenated.",
    "NeMo Automodel": "NeMo Automodel 0.7.0 with the transformers that it asks for, 5.18.0, against that version's "
    "plain training: its plan of the class, FSDP2 in fp32 over one rank, `AutoPipeline` with two micro-batches and a "
    "loss divided by the labels of the batch. Its own models in the place of transformers' are not used. Plain tensors "
    "count as replicated next to DTensors.",
}
# (system, layout, class), regular expressions -> why; the first that fits.
_ROUNDING = (
    "This gradient is zero but for rounding, which a norm or a softmax behind it makes so, and two roundings differ by "
    "1e-7; in fp64 all gradients agree."
)
_NOT_ADDED_UP = (
    "A parameter that each rank uses for its own heads or features is whole on every rank, and its gradients, each of "
    "a part, are not added up."
)
_ONE_PIECE = (
    "`gate_up_proj`, which holds gates and the other half one behind the other, is cut as one piece, so that a rank "
    "has gates alone."
)
_TIED = (
    "(Bert|BigBird|Camembert|ConvBert|Deberta|DebertaV2|DistilBert|Electra|Ernie|Esm|FNet|Funnel|Gte|MegatronBert"
    "|MobileBert|MPNet|NeoMME|NomicBert|Perceiver|Roberta|RobertaPreLayerNorm|Xmod|Yoso)ForMaskedLM"
    "|(Bert|BigBird|Ernie|FNet|Lxmert|MegatronBert)ForPreTraining|BertLMHeadModel|(Bart|BioGpt|Blenderbot|BlenderbotSmall"
    "|Bloom|Camembert|Cohere2Moe|Electra|Ernie|Ernie4_5_Moe|Falcon|Zamba2)ForCausalLM"
    "|(CTRL|GPT2)LMHeadModel|(BigBird|Cohere2?|CohereCompass|Ernie4_5|FalconMamba|Gemma2|GPTNeo|GPTNeoXJapanese|GraniteSWA"
    "|Kosmos2Text|Kosmos2_5Text|Lfm2|Marian|ModernBertDecoder|Mvp|Pegasus|RoCBert|RoFormer|TrOCR|VaultGemma|XLMRoberta"
    "|XLMRobertaXL|Zamba|Zaya)ForCausalLM|(AyaVision|BigBirdPegasus|Blip|Cohere2Vision|DeepseekVL|Gemma3|Gemma4Unified|HyperCLOVAXVisionV2"
    "|InternVL|Lfm2Vl|LightOnOcr|Ovis2|PaliGemma|Qwen3ASR|T5Gemma|Whisper)ForConditionalGeneration|SpeechT5ForSpeechToText"
)
_NOTES: list[tuple[str, str, str, str]] = [
    ("ours", "tp2(pp2)?", "MobileViTForImageClassification", _ROUNDING),
    ("ours", "tp2pp2", "RoCBertForQuestionAnswering", _ROUNDING),
    ("transformers tp_plan", "tp2", "Inkling2For.*", _ONE_PIECE),
    ("transformers tp_plan", "tp2", "ApertusFor.*|Qwen3OmniMoeThinkerForConditionalGeneration", _NOT_ADDED_UP),
    ("DeepSpeed AutoTP", "tp2", "(Apertus|Bros|BrosSpadeEL|Molmo2|Sapiens2|SpeechT5)For.*", _NOT_ADDED_UP),
    (
        "DeepSpeed AutoTP",
        "tp2",
        "(Fuyu|Persimmon)For.*",
        "It cuts `query_key_value` as three blocks one behind the other, its form for a `DecoderLayer`; the class "
        "holds the query, key and value of a head next to each other.",
    ),
    (
        "torch pipelining.*",
        "pp2",
        f"(?:{_TIED})",
        "Embedding and head share a weight; each stage has a copy of it, and their gradients are not added up.",
    ),
    (
        "torch pipelining",
        "pp2",
        "(DPT|MobileNetV2|MobileViT|MobileViTV2|Segformer)ForSemanticSegmentation|GLPNForDepthEstimation"
        "|MobileNetV1ForImageClassification|PerceiverForImageClassificationConvProcessing",
        "Batch norm takes its statistics of each micro-batch, in plain training of the batch.",
    ),
    (
        "torch pipelining",
        "pp2",
        "(BigBirdPegasus|CpmAnt)ForCausalLM|(Electra|Funnel|Splinter)ForPreTraining|BrosSpadeELForTokenClassification",
        "The loss is no mean over the labels that weigh micro-batches here: this one says nothing of the library.",
    ),
    (
        "transformers tp_plan|torch parallelize_module|DeepSpeed AutoTP",
        "tp2",
        "DogeForCausalLM",
        "The plan cuts the heads of attention, and its dynamic mask (`A`, `dt_proj`) keeps an entry for each of them.",
    ),
    (
        "DeepSpeed AutoTP",
        "tp2",
        "WavLMForAudioFrameClassification",
        "The heads are cut, and the position bias, which the class computes for all of them, is not.",
    ),
    (
        "DeepSpeed AutoTP",
        "tp2",
        "CanaryForConditionalGeneration|MobileBertForSequenceClassification",
        "A layer gets parts where it expects whole inputs, or the reverse: AutoTP tells rows from columns by names.",
    ),
    (
        "DeepSpeed AutoTP|NeMo Automodel",
        "tp2",
        "DiffLlamaFor.*",
        "The class subtracts the second half of its heads from the first; each rank pairs the heads that it has.",
    ),
    (
        "DeepSpeed AutoTP",
        "tp2",
        "Vilt.*",
        "The class draws patches at random, and other numbers were drawn before: this one says nothing of the library.",
    ),
    (
        "torch pipelining.*",
        "pp2",
        "(Canary|MT5)ForConditionalGeneration",
        "A traced stage returns a tensor that is not contiguous, and the schedule sends it as it is.",
    ),
    ("NeMo Automodel", "(tp2)?pp2|tp2", "Glm4?For.*", _ONE_PIECE),
    ("NeMo Automodel", "tp2(pp2)?", "ApertusFor.*", _NOT_ADDED_UP),
    (
        "NeMo Automodel",
        "tp2(pp2)?",
        "(Dots1|Gemma3Text|Gemma3n|HunYuanDenseV1|HunYuanMoEV1|HYV3|Mellum|MiniMaxM3VL|Qwen3Moe|Qwen3Next|Qwen3_5Moe"
        "|Qwen3OmniMoeTalker|Qwen3OmniMoeThinker|Qwen4Exp)For.*",
        "It has no plan for the class, warns, and applies its default one, which lacks the norms of heads: they see "
        "half of the heads on each rank, and their gradients are averaged instead of summed. Qwen3 has a plan, and is "
        "exact.",
    ),
    (
        "NeMo Automodel",
        "tp2",
        "(Doge|Kosmos2Text|MiMoV2Flash|OlmoHybrid)ForCausalLM",
        "It has no plan for the class, warns, and applies its default one, which cuts `q_proj`, `k_proj`, `v_proj` and "
        "`o_proj`; the class's attention has another form.",
    ),
    (
        "NeMo Automodel",
        "tp2",
        "(BigBirdPegasus|PLBart|T5|UMT5|Udop)For.*",
        "Its groups of FSDP2 part the modules that share an embedding.",
    ),
    (
        "NeMo Automodel",
        "(tp2)?pp2",
        "(Afmoe|Cwm|Doge|Exaone4|ExaoneMoe|GptOss|GraniteMoeSWA|Ministral|Ministral3|Mistral|Mixtral|Phi3|Phi4Multimodal"
        "|Phimoe)ForCausalLM",
        "Its stages run a forward of its own, of Llama's form, which takes the full causal mask where the class takes "
        "that of a window. In one process without a pipeline, that forward has other logits, too.",
    ),
    (
        "NeMo Automodel",
        "(tp2)?pp2",
        "(CodeGen|FalconH1|FalconMamba|GPTNeo|Persimmon|Inkling|Mamba2|MiMoV2Flash|NanoChat|OlmoHybrid|Phi|RoFormer|xLSTM)"
        "ForCausalLM",
        "Its stages run a forward of its own, of Llama's form, which does not fit the class; in one process, too.",
    ),
]


def note_on(system: str, layout: str, name: str) -> str:
    """Return why a class is wrong, crashed or hung; empty if nobody has looked at it."""
    for patterns in _NOTES:
        if all(re.fullmatch(pattern, value) for pattern, value in zip(patterns, (system, layout, name), strict=False)):
            return patterns[3]
    return ""
