"""Which model types are of text decoders, and which of these are common."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Text families with released weights that are widely used, by who made them. Chosen without looking at what is
# served; the goal of docs/models.md counts these.
COMMON = _names(
    """
    llama llama4_text opt
    mistral mixtral ministral ministral3
    qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next qwen3_5_text qwen3_5_moe_text
    gemma gemma2 gemma3_text gemma3n_text gemma4_text recurrent_gemma
    phi phi3 phimoe bitnet
    gpt2 gpt_oss gpt_neo gptj gpt_neox
    deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4
    glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa
    kimi_linear minimax minimax_m2 minimax_m3_vl_text
    granite granitemoe granitemoehybrid gpt_bigcode starcoder2
    cohere cohere2 cohere2_moe
    olmo olmo2 olmo3 olmoe
    nemotron nemotron_h exaone4 exaone_moe
    hunyuan_v1_dense hunyuan_v1_moe ernie4_5 ernie4_5_moe
    falcon falcon_h1 falcon_mamba mamba mamba2 rwkv jamba zamba2
    lfm2 lfm2_moe
    bloom mpt dbrx stablelm
    smollm3 seed_oss apertus dots1 mimo_v2_flash longcat_flash
    """
)
# Not text decoders: encoders that can be made decoders, and decoders of models that translate.
ENCODERS = _names(
    """
    bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
    roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod
    bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet
    """
)
# Wholes with images or sound, of which the text half is a class too, and decoders of sound and pictures.
OTHER_INPUTS = _names(
    """
    dots3_note emu3 fuyu gemma3 gemma3n gemma4 gemma4_unified gemma4_assistant gemma4_unified_assistant git got_ocr2
    llama4 mllama moshi moss_transcribe_diarize musicgen musicgen_melody phi4_multimodal qwen3_5 qwen3_5_moe qwen4_exp
    trocr whisper
    """
)


def is_text_decoder(model_type: str) -> bool:
    """True for models that read and write text alone."""
    return model_type not in ENCODERS | OTHER_INPUTS
