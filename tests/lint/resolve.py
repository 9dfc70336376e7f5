"""Run by the target's interpreter: what configuration vLLM makes of argument lists.

Reads {"name": [words]} from standard input. Prints one line a name, [name, the configuration as text] or
[name, {"error": why}]. The first argument says how far to go:

parse    the server's parser alone; the configuration is the text of its arguments
resolve  the engine's configuration; nothing is loaded
boot     an engine of its own in a forked process, asked for two tokens; its configuration afterwards.
         The fork saves the import, which takes longer than the tiny model.
"""

import json
import os
import sys
from argparse import Namespace
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.llm_engine import LLMEngine

SERVER = UsageContext.OPENAI_API_SERVER


def parsed(words: list[str]) -> Namespace:
    """As `vllm serve` reads them: the model may stand first."""
    found: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    return found


def resolved(words: list[str]) -> Any:
    """The configuration that the arguments make."""
    made = AsyncEngineArgs.from_cli_args(parsed(words)).create_engine_config(SERVER)
    made.instance_id = ""
    made.parallel_config._data_parallel_master_port_list = []
    return made


def booted(words: list[str]) -> Any:
    """The configuration of an engine that has answered."""
    engine = LLMEngine.from_vllm_config(resolved(words), usage_context=SERVER)
    asked = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
    engine.add_request("one", {"prompt_token_ids": [5, 6, 7]}, asked)
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        for answer in engine.step():
            tokens = list(answer.outputs[0].token_ids)
    assert len(tokens) == 2, tokens
    return engine.vllm_config


def told(words: list[str], how: str) -> object:
    try:
        if how == "parse":
            return repr(parsed(words))
        made = booted(words) if how == "boot" else resolved(words)
        return "\n".join(f"{part} {getattr(made, part)!r}" for part in sorted(vars(made)))
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def forked(words: list[str], how: str) -> object:
    """`told` by a child process, whose prints go to standard error."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(2, 1)
        with os.fdopen(writing, "w") as answer:
            json.dump(told(words, how), answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": "the engine's process died"}


for name, words in json.load(sys.stdin).items():
    ask = forked if sys.argv[1] == "boot" else told
    print(json.dumps([name, ask(words, sys.argv[1])]), flush=True)
