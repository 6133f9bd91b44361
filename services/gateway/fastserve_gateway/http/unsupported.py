"""Fields of the OpenAI API, and of vLLM's, that this server does not have: refused by name, never ignored."""

from collections.abc import Mapping

from pydantic import JsonValue

#: Refused fields and the values that mean "not used", which are accepted. Everything else gets a 400 that names it.
Neutral = Mapping[str, tuple[JsonValue, ...]]

UNSUPPORTED: Neutral = {
    "suffix": (None, ""),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "prompt_logprobs": (None,),
    "bad_words": (None, []),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1.0),
    "truncate_prompt_tokens": (None,),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "allowed_token_ids": (None, []),
    "return_token_ids": (None, False),
    "store": (None, False),
    "metadata": (None, {}),
    "service_tier": (None, "auto", "default"),
    "user": (None,),
}
UNSUPPORTED_CHAT: Neutral = {
    **{name: neutral for name, neutral in UNSUPPORTED.items() if name != "suffix"},
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "documents": (None, []),
}
