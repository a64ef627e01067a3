"""The table of programs: a family, on which side of the split it is, and how it is made.

A family (an architecture) is on one side as a whole, so that what is learnt from `fit` is judged on architectures
that nobody looked into. The split was drawn before anything was lowered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from benchmarks.real.steps import Lowerable

Split = Literal["fit", "judge"]


@dataclass(frozen=True)
class Real:
    """One program. `make` imports the package that it is made of, so that the table can be read without any."""

    family: str
    split: Split
    make: Callable[[], Lowerable]


def _hf(
    builder: str, model: str, config: str, style: str = "", optimiser: str = "", **sizes: Any
) -> Callable[[], Lowerable]:
    """A program of `transformers`: `builder` is a function of `transformers_flax`, `sizes` the configuration."""

    def make() -> Lowerable:
        import transformers

        from benchmarks.real import transformers_flax

        own = {name: sizes.pop(name) for name in ("batch", "length", "beams", "new", "prompt") if name in sizes}
        options = {k: v for k, v in {"style": style, "optimiser": optimiser}.items() if v}
        made = getattr(transformers, config)(**sizes)
        arguments = (made,) if model == "" else (model, made)
        found: Lowerable = getattr(transformers_flax, builder)(*arguments, **options, **own)
        return found

    return make


def _scanned(style: str, policy: str) -> Real:
    def make() -> Lowerable:
        from benchmarks.real import scanned

        return scanned.scanned_decoder(style, policy)

    return Real(f"scanned {style}", "fit", make)


def _other(builder: str, *arguments: Any, **options: Any) -> Callable[[], Lowerable]:
    def make() -> Lowerable:
        from benchmarks.real import other_packages

        found: Lowerable = getattr(other_packages, builder)(*arguments, **options)
        return found

    return make


_WIDTH = {"hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 3072}
_BART = {
    "d_model": 768,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
    "max_position_embeddings": 512,
}
_LLAMA = {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 2816,
    "max_position_embeddings": 1024,
}

PROGRAMS: dict[str, Real] = {
    # encoders
    "bert": Real("bert", "fit", _hf("masked", "FlaxBertForMaskedLM", "BertConfig", **_WIDTH)),
    "bert train state": Real(
        "bert", "fit", _hf("masked", "FlaxBertForMaskedLM", "BertConfig", "train state", "lion", **_WIDTH)
    ),
    "roberta": Real(
        "roberta",
        "fit",
        _hf("masked", "FlaxRobertaForMaskedLM", "RobertaConfig", "one state", max_position_embeddings=520, **_WIDTH),
    ),
    "albert": Real(
        "albert",
        "judge",
        _hf("masked", "FlaxAlbertForMaskedLM", "AlbertConfig", "train state", embedding_size=128, **_WIDTH),
    ),
    "distilbert": Real(
        "distilbert",
        "judge",
        _hf(
            "masked",
            "FlaxDistilBertForMaskedLM",
            "DistilBertConfig",
            "separate",
            "adafactor",
            dim=768,
            n_layers=6,
            n_heads=12,
            hidden_dim=3072,
        ),
    ),
    "electra": Real(
        "electra", "judge", _hf("masked", "FlaxElectraForMaskedLM", "ElectraConfig", "one state", **_WIDTH)
    ),
    "roformer": Real(
        "roformer", "judge", _hf("masked", "FlaxRoFormerForMaskedLM", "RoFormerConfig", "train state", "lion", **_WIDTH)
    ),
    "xlm-roberta": Real(
        "roberta",
        "fit",
        _hf(
            "masked",
            "FlaxXLMRobertaForMaskedLM",
            "XLMRobertaConfig",
            "mixed precision",
            vocab_size=250_002,
            max_position_embeddings=520,
            **_WIDTH,
        ),
    ),
    "prelayernorm": Real(
        "prelayernorm",
        "judge",
        _hf(
            "masked",
            "FlaxRobertaPreLayerNormForMaskedLM",
            "RobertaPreLayerNormConfig",
            "remat",
            max_position_embeddings=520,
            **_WIDTH,
        ),
    ),
    "bigbird": Real(
        "bigbird",
        "judge",
        _hf("masked", "FlaxBigBirdForMaskedLM", "BigBirdConfig", attention_type="original_full", **_WIDTH),
    ),
    # decoders
    "gpt2": Real("gpt2", "fit", _hf("causal", "FlaxGPT2LMHeadModel", "GPT2Config", n_layer=6)),
    "gpt2 accumulating": Real(
        "gpt2", "fit", _hf("causal", "FlaxGPT2LMHeadModel", "GPT2Config", "accumulating", n_layer=6, batch=128)
    ),
    "gpt2 mixed": Real("gpt2", "fit", _hf("causal", "FlaxGPT2LMHeadModel", "GPT2Config", "mixed precision", n_layer=6)),
    "gpt-neo": Real(
        "gpt-neo",
        "judge",
        _hf(
            "causal",
            "FlaxGPTNeoForCausalLM",
            "GPTNeoConfig",
            "train state",
            hidden_size=1024,
            num_layers=4,
            num_heads=16,
            attention_types=[[["global", "local"], 2]],
        ),
    ),
    "gpt-j": Real(
        "gpt-j",
        "judge",
        _hf(
            "causal",
            "FlaxGPTJForCausalLM",
            "GPTJConfig",
            "separate",
            "adafactor",
            n_embd=1024,
            n_layer=4,
            n_head=16,
            rotary_dim=32,
        ),
    ),
    "opt": Real(
        "opt",
        "judge",
        _hf(
            "causal",
            "FlaxOPTForCausalLM",
            "OPTConfig",
            "one state",
            hidden_size=768,
            ffn_dim=3072,
            num_hidden_layers=6,
            num_attention_heads=12,
            word_embed_proj_dim=768,
        ),
    ),
    "bloom": Real(
        "bloom",
        "judge",
        _hf(
            "causal", "FlaxBloomForCausalLM", "BloomConfig", "separate", "lion", hidden_size=1024, n_layer=4, n_head=16
        ),
    ),
    "xglm": Real(
        "xglm",
        "judge",
        _hf(
            "causal",
            "FlaxXGLMForCausalLM",
            "XGLMConfig",
            "train state",
            "adafactor",
            vocab_size=256_008,
            d_model=1024,
            ffn_dim=4096,
            num_layers=4,
            attention_heads=16,
        ),
    ),
    "llama": Real("llama", "fit", _hf("causal", "FlaxLlamaForCausalLM", "LlamaConfig", "remat", **_LLAMA)),
    "gemma": Real(
        "gemma",
        "judge",
        _hf(
            "causal",
            "FlaxGemmaForCausalLM",
            "GemmaConfig",
            "mixed precision",
            head_dim=128,
            vocab_size=256_000,
            **_LLAMA,
        ),
    ),
    "mistral": Real(
        "mistral",
        "judge",
        _hf("causal", "FlaxMistralForCausalLM", "MistralConfig", "accumulating", batch=128, **_LLAMA),
    ),
    # encoders and decoders
    "t5": Real(
        "t5",
        "fit",
        _hf(
            "translating",
            "FlaxT5ForConditionalGeneration",
            "T5Config",
            "separate",
            "adafactor",
            num_layers=4,
            d_model=768,
            d_ff=3072,
            num_heads=12,
        ),
    ),
    "mt5": Real(
        "t5",
        "fit",
        _hf(
            "translating",
            "FlaxMT5ForConditionalGeneration",
            "MT5Config",
            "train state",
            num_layers=4,
            d_model=768,
            d_ff=2048,
            num_heads=12,
            d_kv=64,
        ),
    ),
    "longt5": Real(
        "longt5",
        "judge",
        _hf(
            "translating",
            "FlaxLongT5ForConditionalGeneration",
            "LongT5Config",
            "separate",
            num_layers=4,
            d_model=768,
            d_ff=2048,
            num_heads=12,
        ),
    ),
    "bart": Real("bart", "fit", _hf("translating", "FlaxBartForConditionalGeneration", "BartConfig", **_BART)),
    "blenderbot": Real(
        "blenderbot",
        "judge",
        _hf("translating", "FlaxBlenderbotForConditionalGeneration", "BlenderbotConfig", "one state", **_BART),
    ),
    "marian": Real(
        "marian",
        "judge",
        _hf("translating", "FlaxMarianMTModel", "MarianConfig", "train state", pad_token_id=58_100, **_BART),
    ),
    "mbart": Real(
        "mbart",
        "judge",
        _hf("translating", "FlaxMBartForConditionalGeneration", "MBartConfig", "separate", "adafactor", **_BART),
    ),
    "pegasus": Real(
        "pegasus",
        "judge",
        _hf(
            "translating",
            "FlaxPegasusForConditionalGeneration",
            "PegasusConfig",
            "separate",
            "multisteps",
            vocab_size=96_103,
            **_BART,
        ),
    ),
    "whisper": Real(
        "whisper",
        "judge",
        _hf(
            "speech",
            "",
            "WhisperConfig",
            "train state",
            d_model=512,
            encoder_layers=4,
            decoder_layers=4,
            encoder_attention_heads=8,
            decoder_attention_heads=8,
            encoder_ffn_dim=2048,
            decoder_ffn_dim=2048,
            max_source_positions=512,
        ),
    ),
    # images
    "vit": Real(
        "vit", "fit", _hf("images", "FlaxViTForImageClassification", "ViTConfig", num_hidden_layers=6, num_labels=1000)
    ),
    "beit": Real(
        "beit",
        "judge",
        _hf(
            "images",
            "FlaxBeitForImageClassification",
            "BeitConfig",
            "train state",
            num_hidden_layers=6,
            num_labels=1000,
            use_relative_position_bias=True,
        ),
    ),
    "dinov2": Real(
        "dinov2",
        "judge",
        _hf("images", "FlaxDinov2ForImageClassification", "Dinov2Config", num_hidden_layers=6, num_labels=1000),
    ),
    "resnet": Real(
        "resnet",
        "fit",
        _hf("images", "FlaxResNetForImageClassification", "ResNetConfig", "separate", "momentum", num_labels=1000),
    ),
    "regnet": Real(
        "regnet",
        "judge",
        _hf("images", "FlaxRegNetForImageClassification", "RegNetConfig", "separate", "momentum", num_labels=1000),
    ),
    "clip": Real(
        "clip",
        "judge",
        _hf(
            "contrastive",
            "",
            "CLIPConfig",
            "train state",
            text_config={"num_hidden_layers": 6},
            vision_config={"num_hidden_layers": 6},
        ),
    ),
    # inference
    "gpt2 prefill": Real("gpt2", "fit", _hf("prefill", "FlaxGPT2LMHeadModel", "GPT2Config", n_layer=12)),
    "llama prefill": Real("llama", "fit", _hf("prefill", "FlaxLlamaForCausalLM", "LlamaConfig", **_LLAMA)),
    "opt prefill": Real(
        "opt",
        "judge",
        _hf(
            "prefill",
            "FlaxOPTForCausalLM",
            "OPTConfig",
            hidden_size=1024,
            ffn_dim=4096,
            num_hidden_layers=8,
            num_attention_heads=16,
            word_embed_proj_dim=1024,
        ),
    ),
    "gpt2 greedy": Real("gpt2", "fit", _hf("generating", "FlaxGPT2LMHeadModel", "GPT2Config", n_layer=4)),
    "gpt-neo beams": Real(
        "gpt-neo",
        "judge",
        _hf(
            "generating",
            "FlaxGPTNeoForCausalLM",
            "GPTNeoConfig",
            hidden_size=1024,
            num_layers=4,
            num_heads=16,
            attention_types=[[["global", "local"], 2]],
            beams=4,
            batch=16,
        ),
    ),
    "bart beams": Real(
        "bart", "fit", _hf("generating", "FlaxBartForConditionalGeneration", "BartConfig", beams=4, batch=16, **_BART)
    ),
    "xglm sampling": Real(
        "xglm",
        "judge",
        _hf(
            "sampling",
            "FlaxXGLMForCausalLM",
            "XGLMConfig",
            d_model=1024,
            ffn_dim=4096,
            num_layers=4,
            attention_heads=16,
        ),
    ),
    # Flax Linen and NNX, Equinox, Haiku, jraph
    "linen lstm": Real("lstm", "fit", _other("linen_recurrent", "OptimizedLSTMCell")),
    "linen gru": Real("gru", "judge", _other("linen_recurrent", "GRUCell", "one state", "adamw")),
    "linen mixer": Real("mixer", "judge", _other("linen_mixer")),
    "linen wavenet": Real("wavenet", "judge", _other("linen_wavenet")),
    "linen autoencoder": Real("autoencoder", "judge", _other("linen_autoencoder")),
    "nnx decoder": Real("nnx decoder", "judge", _other("nnx_decoder")),
    "equinox vit": Real("vit", "fit", _other("equinox_vit")),
    "equinox gru": Real("gru", "judge", _other("equinox_gru")),
    "haiku resnet": Real("resnet", "fit", _other("haiku_resnet")),
    "haiku decoder": Real("haiku decoder", "judge", _other("haiku_decoder")),
    "haiku lstm": Real("lstm", "fit", _other("haiku_lstm")),
    "jraph network": Real("graph network", "fit", _other("jraph_network", "network")),
    "jraph convolution": Real("graph convolution", "judge", _other("jraph_network", "convolution")),
    "jraph attention": Real("graph attention", "judge", _other("jraph_network", "attention")),
    # decoders with stacked layers: five styles, four policies of what is recomputed (see `scanned`)
    **{
        f"scan {style} {policy}": _scanned(style, policy)
        for style in ("own", "maxtext", "linen", "nnx", "equinox")
        for policy in ("kept", "full", "dots", "names")
    },
}


def chosen(names: list[str], split: str) -> list[str]:
    """The programs asked for; all of a split (`fit`, `judge` or `all`) where none are named."""
    unknown = [name for name in names if name not in PROGRAMS]
    if unknown:
        raise SystemExit(f"no program {', '.join(unknown)}; there are: {', '.join(PROGRAMS)}")
    return names or [name for name, program in PROGRAMS.items() if split in ("all", program.split)]
