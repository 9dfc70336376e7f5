"""The environment variables of the tuner; tests/test_site.py finds every one that the code names."""

VARIABLES: dict[str, dict[str, str]] = {
    "Settings": {
        "`TUNER_HOME`": "folder of trials, logs, traces and, without `TUNER_DATABASE_URL`, the database;"
        " default"
        " `~/.local/share/tuner`",
        "`TUNER_DATABASE_URL`": "the history; default: SQLite in `TUNER_HOME`. PostgreSQL when more than"
        " one machine"
        " writes: `postgresql://user@host/name`, extra `postgres`",
        "`TUNER_ARTIFACTS`": "a folder that several hosts mount, or a URL that fsspec opens"
        " (`s3://bucket/tuner`, extra"
        " `artifacts`): traces are also kept there",
    },
    "Capture inside vLLM": {
        "`TUNER_CAPTURE_OUT`": "the file of the capture, or with a name the folder of its files"
        " ([Traffic](../traffic.md#capture-tuner-capture-upstream-url))",
        "`TUNER_CAPTURE_NAME`": "the name before the time in the names of the files",
        "`TUNER_CAPTURE_EVERY`": "`hour` or `day`: when a new file begins",
        "`TUNER_CAPTURE_KEEP`": "how many closed files stay",
        "`TUNER_CAPTURE_TOKENIZER`": "the model's tokenizer.json, for exact lengths",
    },
    "Simulated engine": {
        "`TUNER_SIM_CARD`": "the card to simulate; default `h100-80`",
        "`TUNER_SIM_CARDS`": "how many of them; default 1",
        "`TUNER_SIM_COEFFICIENTS`": "JSON of a calibration's coefficients",
        "`TUNER_SIM_SPEED`": "2 = twice real time",
        "`TUNER_SIM_NOISE`": "relative noise of each step's time, one standard deviation",
        "`TUNER_SIM_SEED`": "seed of that noise",
        "`TUNER_SIM_STARTUP_S`": "seconds that it pretends to load",
        "`TUNER_SIM_RELEASE`": "JSON: another release of it (docs/compare.md)",
        "`TUNER_SIM_BLIND`": "1: every step takes 10 ms whatever the knobs say (for tests of the tuner)",
        "`TUNER_SIM_HIDDEN`": "for the `tuner` command with `clock: virtual`: how the engine differs from the"
        " predictions ([Simulator](../simulator.md#the-virtual-clock))",
    },
    "Read, and named otherwise": {
        "`CUDA_VISIBLE_DEVICES`": "the GPUs that a study may use, by CUDA's rules; `engine.env` of the"
        " study comes first",
        "`HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE`": "not read by the tuner; the engine that it starts"
        " inherits them",
    },
    "Set by the tuner for its own processes": {
        "`TUNER_LAUNCH_ID`": "marks the processes of one launch, so that they can be found and stopped",
        "`TUNER_LIVE_LIMITS`": "where a running engine listens for changed limits",
        "`TUNER_SERVICE_VERSION`": "which version of the service started a run",
    },
}
