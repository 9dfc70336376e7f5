"""A small file of every format, true in its fields and values to what the source writes; lengths are ours."""

import json
from collections.abc import Mapping

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
2023-11-16 18:15:52.3909930,91,16
"""
MOONCAKE = "\n".join(
    json.dumps({"timestamp": at, "input_length": size, "output_length": out, "hash_ids": ids})
    for at, size, out, ids in (
        (0, 1500, 52, [46, 47, 48]),
        (3000, 1600, 26, [46, 47, 48, 49]),
        (3000, 600, 3, [46, 50]),
        (6001, 512, 9, [51]),
    )
)
AIPERF = "\n".join(
    json.dumps(one)
    for one in (
        {"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]},
        {"session_id": "a", "delay": 1500, "input_length": 1100, "output_length": 9, "hash_ids": [1, 2, 3]},
        {"session_id": "b", "timestamp": 700, "input_length": 100, "output_length": 4, "hash_ids": [4]},
    )
)
BURSTGPT_1 = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
"""
BURSTGPT_3 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,1722ac82-0a46,43,GPT-4,906,446,1352,Conversation log
19440161.0,d5983bf9-4b48,2,ChatGPT,36,29,65,Conversation log
19440192.0,1722ac82-0a46,8,GPT-4,1779,123,1902,Conversation log
"""
BAILIAN = "\n".join(
    json.dumps(
        dict(zip(("chat_id", "parent_chat_id", "timestamp", "input_length"), one[:4], strict=True)) | more
    )
    for one, more in (
        (
            (159, -1, 61.114, 40),
            {"output_length": 132, "type": "text", "turn": 1, "hash_ids": [1089, 1090, 1091]},
        ),
        (
            (160, 159, 62.5, 64),
            {"output_length": 80, "type": "text", "turn": 2, "hash_ids": [1089, 1090, 7, 8]},
        ),
        (
            (161, 160, 70.25, 80),
            {"output_length": 8, "type": "text", "turn": 3, "hash_ids": [1089, 1090, 7, 8, 9]},
        ),
        ((162, 99, 71.0, 16), {"output_length": 5, "type": "image", "turn": 2, "hash_ids": [5]}),
    )
)
_LITELLM_HEAD = (
    "request_id,call_type,api_key,total_tokens,prompt_tokens,completion_tokens,startTime,endTime,"
    "completionStartTime,model,user,cache_hit,session_id,end_user,status\n"
)
_R1 = "r1,acompletion,h1,150,100,50,2026-06-01 10:00:00.125,2026-06-01 10:00:02.125"
LITELLM = (
    _LITELLM_HEAD
    + f"""{_R1},2026-06-01 10:00:00.625,m,u,False,s1,e1,success
r2,aembedding,h1,9,9,0,2026-06-01 10:00:00.500,2026-06-01 10:00:00.600,,m,u,False,s1,,success
r3,acompletion,h1,150,100,50,2026-06-01 10:00:01,2026-06-01 10:00:01.001,,m,u,True,s1,,success
r4,acompletion,h2,100,100,0,2026-06-01T12:00:03+02:00,2026-06-01T12:00:04+02:00,,m,u,False,,,failure
{_R1},,m,u,False,s1,e1,success
"""
)


def _span(
    number: int, attributes: Mapping[str, object], parent: str = "", **more: object
) -> dict[str, object]:
    start = 1_780_000_000_000_000_000 + number * 1_000_000_007
    pairs = [
        {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}
        if not isinstance(value, float)
        else {"key": key, "value": {"doubleValue": value}}
        for key, value in attributes.items()
    ]
    ids = {"traceId": "t", "spanId": f"s{number}", "parentSpanId": parent}
    times = {"startTimeUnixNano": str(start), "endTimeUnixNano": str(start + 500_000_000)}
    return ids | times | {"name": "llm_request", "attributes": pairs} | more


OTLP_OBJECT = {
    "resourceSpans": [
        {
            "resource": {"attributes": []},
            "scopeSpans": [
                {
                    "spans": [
                        _span(
                            0,
                            {
                                "gen_ai.usage.prompt_tokens": 10,
                                "gen_ai.usage.completion_tokens": 5,
                                "gen_ai.request.max_tokens": 64,
                                "gen_ai.request.n": 2,
                                "gen_ai.latency.time_to_first_token": 0.25,
                            },
                        ),
                        _span(1, {"gen_ai.usage.input_tokens": 20, "gen_ai.usage.output_tokens": 7}),
                        _span(
                            2,
                            {
                                "gen_ai.usage.input_tokens": 20,
                                "gen_ai.usage.output_tokens": 7,
                                "gen_ai.conversation.id": "c",
                            },
                            parent="s1",
                        ),
                        _span(3, {"http.method": "POST"}),
                        _span(4, {"gen_ai.usage.input_tokens": 9}, status={"code": 2}),
                    ]
                }
            ],
        }
    ]
}
OTLP = json.dumps(OTLP_OBJECT)
OPENAI = "\n".join(
    json.dumps(one)
    for one in (
        {
            "timestamp": "2026-06-01T10:00:00.5Z",
            "id": "a",
            "request": {
                "model": "m",
                "messages": [{"role": "user", "content": "hello " * 40}],
                "max_tokens": 100,
            },
            "response": {"usage": {"prompt_tokens": 60, "completion_tokens": 20}, "choices": []},
            "end_time": "2026-06-01T10:00:01.5Z",
        },
        {
            "timestamp": "2026-06-01T10:00:02Z",
            "id": "b",
            "request": {
                "model": "m",
                "messages": [{"role": "user", "content": "hello " * 40 + "you"}],
                "n": 2,
            },
            "response": {
                "usage": {
                    "prompt_tokens": 61,
                    "completion_tokens": 3,
                    "prompt_tokens_details": {"cached_tokens": 48},
                }
            },
            "status_code": 200,
        },
        {
            "timestamp": 1780308003.25,
            "id": "c",
            "request": {"prompt": "x"},
            "response": {"error": {"code": 1}},
        },
    )
)
_PARAMS = "params: SamplingParams(n=1, temperature=0.0, max_tokens=5, min_tokens=0), lora_request: None."


def _log(level: str, at: str, text: str) -> str:
    return f"(APIServer pid=26470) {level} {at} [request_logger.py:65] {text}"


VLLM_LOG = "\n".join(
    [
        _log(
            "DEBUG",
            "12-31 23:59:58",
            f"Request a details: prompt: None, prompt_token_ids: {list(range(40))}, "
            "prompt_embeds shape: None.",
        ),
        _log("INFO", "12-31 23:59:58", f"Received request a: {_PARAMS}"),
        _log("INFO", "12-31 23:59:59", f"Received request nolength: {_PARAMS}"),
        _log("INFO", "01-01 00:00:01", "Avg prompt throughput: 3.2 tokens/s"),
        _log("DEBUG", "01-01 00:00:01", "Generated response a details: output_token_ids: [7, 8, 9]"),
        _log("INFO", "01-01 00:00:01", "Generated response a: output: '', finish_reason: stop"),
        _log(
            "DEBUG",
            "01-01 00:00:01",
            f"Request b details: prompt: None, prompt_token_ids: {list(range(33))}, "
            "prompt_embeds shape: None.",
        ),
        _log("INFO", "01-01 00:00:01", f"Received request b: {_PARAMS}"),
    ]
)
TRACELAB = "\n".join(
    json.dumps(
        {
            "provider": "claude",
            "session_id": "s",
            "round_index": number,
            "model": "m",
            "input_tokens_total": total,
            "prefix_tokens": prefix,
            "newly_append_tokens": total - prefix,
            "output_tokens": out,
            "timing_events": [
                {"event_type": "tool_result", "timestamp": f"2026-06-01T05:4{number}:20.151Z"},
                {"event_type": "text", "timestamp": f"2026-06-01T05:4{number}:29.500Z"},
            ],
        }
    )
    for number, total, prefix, out in ((0, 320, 160, 40), (1, 400, 352, 16), (2, 500, 416, 10))
)
CAPTURE = "\n".join(
    json.dumps(one)
    for one in (
        {"capture": 1, "block_size": 16, "started_at": "2026-06-01T10:00:00+00:00", "blocks_from": "tokens"},
        {"r": 1, "t": 1_000_000, "i": 40, "m": 64, "c": 0, "s": 0, "b": [[0, 2]]},
        {"r": 2, "t": 5_000_000, "i": 70, "c": 1, "p": -3, "n": 2, "b": [[0, 2], [7, 1]]},
        {"r": 1, "f": 1500, "e": 250_000, "o": 9, "k": 0},
        {"r": 2, "f": 1100, "e": 900_000, "o": 12, "k": 32, "st": "cancelled"},
        {"r": 3, "t": 6_000_000, "i": 16, "b": [[9, 1]]},
        {"dropped": 4},
    )
)
GENERIC = """arrival_s,input_tokens,output_tokens,client_id
0.0005,25758,685,65
0.0024,433,410,24
0.1033,79,1100,24
"""

FORMATS: Mapping[str, tuple[str, str]] = {
    "azure": (AZURE, "azure"),
    "mooncake": (MOONCAKE, "mooncake"),
    "aiperf": (AIPERF, "mooncake"),
    "burstgpt-1": (BURSTGPT_1, "burstgpt"),
    "burstgpt-3": (BURSTGPT_3, "burstgpt"),
    "bailian": (BAILIAN, "bailian"),
    "litellm": (LITELLM, "litellm"),
    "otlp": (OTLP, "otlp"),
    "openai": (OPENAI, "openai"),
    "vllm-log": (VLLM_LOG, "vllm-log"),
    "tracelab": (TRACELAB, "tracelab"),
    "capture": (CAPTURE, "capture"),
    "generic": (GENERIC, "generic"),
}
"""Name → (content, the format it should be taken for)."""

UNITS: Mapping[str, str] = {"mooncake": "ms", "aiperf": "ms", "burstgpt-1": "s", "bailian": "s"}
"""Name → the unit of its times, where so small a file leaves it open."""
