"""Language models of transformers."""

from functools import partial

from architectures.architecture import CLASSES, Architecture
from architectures.pretrained import (
    Fields,
    causal_inputs,
    classified_inputs,
    masked_inputs,
    masked_translation_inputs,
    pretrained,
    span_inputs,
    translation_inputs,
)

causal = partial(pretrained, "AutoModelForCausalLM", causal_inputs)
masked = partial(pretrained, "AutoModelForMaskedLM", masked_inputs)
translation = partial(pretrained, "AutoModelForSeq2SeqLM", translation_inputs)

EXPERTS: Fields = {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4}
BATCHED: Fields = EXPERTS | {"experts": "batched_mm"}
LATENT: Fields = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
RELATIVE: Fields = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
GLOBAL = "asks whether any token has global attention: a branch on data"

DECODERS = (
    causal("GPT-2", "GPT2"),
    causal("GPT-2, attention as single ops", "GPT2", attention="eager"),
    causal("GPT-Neo", "GPTNeo", attention_types=[[["global", "local"], 1]], window_size=4),
    causal("GPT-J", "GPTJ", rotary_dim=4),
    causal("GPT-NeoX", "GPTNeoX"),
    causal("GPT-BigCode", "GPTBigCode"),
    causal("OPT", "OPT", word_embed_proj_dim=16),
    causal("Bloom", "Bloom"),
    causal("MPT", "Mpt"),
    causal("Falcon", "Falcon"),
    causal("Falcon, new decoder", "Falcon", new_decoder_architecture=True),
    causal("Llama", "Llama"),
    causal("Mistral", "Mistral", sliding_window=4),
    causal("Qwen2", "Qwen2"),
    causal("Qwen3", "Qwen3"),
    causal("Gemma", "Gemma"),
    causal("Gemma 2", "Gemma2", sliding_window=4),
    causal("Gemma 3", "Gemma3Text", sliding_window=4,
           layer_types=["sliding_attention", "full_attention"]),
    causal("Phi", "Phi"),
    causal("Phi-3", "Phi3", original_max_position_embeddings=32),
    causal("StableLM", "StableLm"),
    causal("Cohere", "Cohere"),
    causal("OLMo 2", "Olmo2"),
    causal("Granite", "Granite"),
    causal("XLNet", "XLNet", mem_len=None, d_head=8),
    causal("GPT-OSS", "GptOss", sliding_window=4, **EXPERTS),
    causal("Mixtral", "Mixtral", **EXPERTS),
    causal("GPT-OSS, batched experts", "GptOss", sliding_window=4, **BATCHED),
    causal("Mixtral, batched experts", "Mixtral", **BATCHED),
    causal("Qwen2-MoE, batched experts", "Qwen2Moe", **BATCHED),
    causal("OLMoE, batched experts", "Olmoe", **BATCHED),
    causal("DeepSeek-V3, batched experts", "DeepseekV3", **LATENT, **BATCHED),
    causal("Mamba", "Mamba", state_size=8),
    causal("Mamba 2", "Mamba2", state_size=8, num_heads=8, n_groups=2, chunk_size=4),
    pretrained("AutoModelForCausalLM", partial(causal_inputs, 4), "RWKV", "Rwkv"),
    causal("RecurrentGemma", "RecurrentGemma", lru_width=32, attention_window_size=4,
           block_types=["recurrent", "attention"]),
)  # fmt: skip

ENCODERS = (
    masked("BERT", "Bert"),
    masked("RoBERTa", "Roberta", max_position_embeddings=34),
    masked("DistilBERT", "DistilBert"),
    masked("ALBERT", "Albert"),
    masked("ELECTRA", "Electra", embedding_size=16),
    masked("DeBERTa", "Deberta", **RELATIVE),
    masked("DeBERTa-v2", "DebertaV2", **RELATIVE, position_buckets=8),
    masked("MPNet", "MPNet"),
    masked("ModernBERT", "ModernBert", local_attention=4),
    masked("FNet", "FNet"),
    masked("ConvBERT", "ConvBert", conv_kernel_size=3),
    masked("SqueezeBERT", "SqueezeBert"),
    masked("XLM-RoBERTa", "XLMRoberta", max_position_embeddings=34),
    masked("RoFormer", "RoFormer"),
    masked("Longformer", "Longformer", attention_window=4, unexportable=GLOBAL),
    pretrained("AutoModelForSequenceClassification", classified_inputs,
               "BERT, classes of sequences", "Bert", num_labels=CLASSES),
    pretrained("AutoModelForQuestionAnswering", span_inputs, "DistilBERT, spans", "DistilBert"),
)  # fmt: skip

TRANSLATORS = (
    translation("T5", "T5", decoder_start_token_id=0),
    translation("T5 1.1", "T5", decoder_start_token_id=0, feed_forward_proj="gated-gelu",
                tie_word_embeddings=False),
    translation("BART", "Bart"),
    translation("mBART", "MBart"),
    translation("Pegasus", "Pegasus"),
    translation("Marian", "Marian"),
    translation("LED", "LED", attention_window=4, unexportable=GLOBAL),
    translation("ProphetNet", "ProphetNet",
                unexportable="asserts that no label is negative: a branch on data"),
    pretrained("AutoModelForSeq2SeqLM", masked_translation_inputs, "Switch", "SwitchTransformers",
               decoder_start_token_id=0, num_experts=4, num_sparse_encoder_layers=1,
               num_sparse_decoder_layers=1,
               unexportable="the router casts its parameters by Module.to in the forward pass"),
)  # fmt: skip

TEXT: tuple[Architecture, ...] = DECODERS + ENCODERS + TRANSLATORS
