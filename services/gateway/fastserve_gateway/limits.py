"""Limits of one request that are the same for every deployment. Each one has a test; settings hold the others.

They bound the work and memory that one request can cost before the scheduler has seen it.
"""

#: Answers of one request: prompts times `n`.
MAX_SEQUENCES = 128
#: `logprobs` and `top_logprobs`: the size of each token's list of alternatives.
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_CHAT_MESSAGES = 4096
MAX_REQUEST_ID_CHARS = 128
MAX_PROGRAM_CHARS = 128
MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 100.0
#: Presence and frequency penalties lie within -MAX_PENALTY .. MAX_PENALTY.
MAX_PENALTY = 2.0

#: HTTP: request line plus headers, and how many headers.
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 100
#: A connection must deliver its headers, and then its body, within these times.
HEADER_TIMEOUT_S = 30.0
BODY_TIMEOUT_S = 60.0
#: A client that leaves what was sent to it unread for this long loses its connection.
WRITE_TIMEOUT_S = 60.0

#: `max_tokens` of /v1/completions when the caller gives none, as the OpenAI API defines it.
DEFAULT_COMPLETION_TOKENS = 16

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
UINT32_MAX = 2**32 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
