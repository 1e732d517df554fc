"""The keys that configs of most architectures have; and keys that are not read for any model, each with the reason."""

from mpar.models.architectures.keys._key import NUMBER, Key
from mpar.models.layers import ACTIVATIONS

__all__ = ["COMMON_KEYS", "IGNORED_KEYS"]

COMMON_KEYS = {
    "vocab_size": Key((int,), positive=True),
    "hidden_size": Key((int,), positive=True),
    "intermediate_size": Key((int,), positive=True),
    "num_hidden_layers": Key((int,), positive=True),
    "num_attention_heads": Key((int,), positive=True),
    "head_dim": Key((int,), None, nullable=True, positive=True),
    "hidden_act": Key((str,), "silu", accepted=tuple(ACTIVATIONS)),
    "rms_norm_eps": Key(NUMBER, 1e-6, positive=True),
    "initializer_range": Key(NUMBER, 0.02),
    "max_position_embeddings": Key((int,), positive=True),
    "original_max_position_embeddings": Key((int,), None, nullable=True, positive=True),
    "rope_theta": Key(NUMBER, None, nullable=True, positive=True),
    "rope_scaling": Key((dict,), None, nullable=True),
    "rope_parameters": Key((dict,), None, nullable=True),
    "tie_word_embeddings": Key((bool,), False),
    "attention_dropout": Key(NUMBER, 0.0, nullable=True, accepted=(0, None)),
    "is_encoder_decoder": Key((bool,), False, accepted=(False,)),
    "add_cross_attention": Key((bool,), False, accepted=(False,)),
    "is_decoder": Key((bool,), False),
    "pruned_heads": Key((dict,), {}, nullable=True, accepted=({}, None)),
    "partial_rotary_factor": Key(NUMBER, 1.0, nullable=True, accepted=(1, None)),
}

_NAMES_ONLY = "a name, date or version; it has no influence on the function"
_GENERATION = "an old place for settings of generation, which takes them as arguments instead"
_OUTPUTS = "chooses what transformers returns, not what the model computes"
_TASK = "belongs to a classification head"
_TOKENS = "only the tokenizer and generation use it"
IGNORED_KEYS = {
    **dict.fromkeys(
        ("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "model_type", "architectures"), _NAMES_ONLY
    ),
    **dict.fromkeys(("torch_dtype", "dtype"), "the dtype is an argument; its default is that of the stored tensors"),
    **dict.fromkeys(
        ("_attn_implementation", "_attn_implementation_autoset", "attn_implementation"), "mpar has one attention function"
    ),
    **dict.fromkeys(("use_cache", "return_dict", "output_attentions", "output_hidden_states", "torchscript"), _OUTPUTS),
    **dict.fromkeys(("chunk_size_feed_forward", "use_bfloat16", "tf_legacy_loss"), "does not change the function in PyTorch"),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"), _TOKENS),
    **dict.fromkeys(("decoder_start_token_id", "tokenizer_class", "prefix"), _TOKENS),
    **dict.fromkeys(("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"), _TASK),
    **dict.fromkeys(("tie_encoder_decoder", "cross_attention_hidden_size"), "only encoder-decoder models read it"),
    **dict.fromkeys(("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"), _GENERATION),
    **dict.fromkeys(("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"), _GENERATION),
    **dict.fromkeys(("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"), _GENERATION),
    **dict.fromkeys(("num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id"), _GENERATION),
    "cache_implementation": _GENERATION,
    "auto_map": "names code that came with the checkpoint; mpar uses its own",
    **dict.fromkeys(("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty"), _GENERATION),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), _GENERATION),
}
"""For each key the reason why it is not read."""
