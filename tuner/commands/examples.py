"""Examples of every command, which its help shows, and the exit codes. A test runs or parses each line."""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": (
        "tuner demo",
        "tuner demo --trials 5 --home try",
        "tuner demo --python ~/vllm-cpu/bin/python --trace chat",
    ),
    "lint": (
        "tuner lint 'vllm serve Qwen/Qwen2.5-7B-Instruct' --card h100-80",
        "tuner lint compose.yaml --trace latest:chat --slo ttft=500,tpot=50",
        "tuner lint http://127.0.0.1:8000 --fail-on warning",
    ),
    "init": (
        "tuner init chat.yaml --from-url http://127.0.0.1:8000 --trace latest:chat",
        "tuner init --model Qwen/Qwen3-8B --space interactive --slo ttft=300,tpot=40",
        "tuner init try.yaml --from compose.yaml --python /opt/vllm/bin/python",
    ),
    "objectives": ("tuner objectives", "tuner objectives --json"),
    "plans": ("tuner plans",),
    "doctor": ("tuner doctor", "tuner doctor chat.yaml"),
    "tune": (
        "tuner tune chat.yaml --dry-run",
        "tuner tune chat.yaml --trials 20 --until 05:30",
        "tuner tune chat.yaml --confirm-only",
        "tuner tune chat.yaml --on auto --nodes gpu=a100",
    ),
    "predict": ("tuner predict chat.yaml", "tuner predict chat.yaml --candidates 200 --json"),
    "capture": (
        "tuner capture --upstream http://127.0.0.1:8000 --name chat",
        "tuner capture --upstream http://gpu-1:8000 --name chat --every day --keep 7",
    ),
    "trace import": (
        "tuner trace import requests.csv --name chat",
        "tuner trace import log.csv --column arrival_s=ts --unit ms",
    ),
    "trace list": ("tuner trace list",),
    "trace show": ("tuner trace show chat", "tuner trace show latest:chat --html chat.html"),
    "trace slice": (
        "tuner trace slice chat",
        "tuner trace slice chat --start 1200 --duration 60 -o peak.parquet",
    ),
    "trace reshape": ("tuner trace reshape chat --share 0.5 -o half.parquet",),
    "trace diff": ("tuner trace diff chat latest:chat",),
    "trace forget": ("tuner trace forget chat",),
    "knobs": ("tuner knobs", "tuner knobs --python /opt/vllm/bin/python --space bursty-mixed"),
    "knobs check": ("tuner knobs check bursty-mixed --python /opt/vllm/bin/python",),
    "baseline import": (
        "tuner baseline import compose.yaml",
        "tuner baseline import 'vllm serve Qwen/Qwen3-8B --max-num-seqs 64'",
    ),
    "compare": (
        "tuner compare today champion --study chat.yaml",
        "tuner compare champion champion@/opt/new/bin/python --study chat.yaml",
    ),
    "upgrade-check": (
        "tuner upgrade-check chat.yaml --to /opt/new/bin/python",
        "tuner upgrade-check chat.yaml --from img:v1 --to img:v2 --alias today",
    ),
    "explain": ("tuner explain 7", "tuner explain 7 --json"),
    "front": ("tuner front chat", "tuner front chat --timings --json"),
    "history": ("tuner history", "tuner history --node gpu-1 --since 2026-03-01 --metric ttft_p95_ms"),
    "report": ("tuner report chat", "tuner report chat -o chat.md"),
    "study list": ("tuner study list",),
    "study show": ("tuner study show chat",),
    "study export": (
        "tuner study export chat --csv chat.csv --parquet chat.parquet",
        "tuner study export chat --optuna sqlite:///chat-optuna.db",
    ),
    "run list": ("tuner run list", "tuner run list --study chat"),
    "run status": ("tuner run status", "tuner run status 3f2a"),
    "run cancel": ("tuner run cancel 3f2a",),
    "trial show": ("tuner trial show chat 7",),
    "trial log": ("tuner trial log chat 7", "tuner trial log chat 7 --lines 0"),
    "profile list": ("tuner profile list", "tuner profile list --model Qwen/Qwen2.5-7B-Instruct"),
    "profile show": ("tuner profile show 3",),
    "profile diff": ("tuner profile diff 2 3",),
    "profile resolve": (
        "tuner profile resolve --model Qwen/Qwen2.5-7B-Instruct",
        "tuner profile resolve --model Qwen/Qwen3-8B -o vllm.yaml --exit-code",
    ),
    "profile export": ("tuner profile export 3 --format args",),
    "profile promote": ("tuner profile promote --model Qwen/Qwen2.5-7B-Instruct",),
    "profile rollback": ("tuner profile rollback --model Qwen/Qwen3-8B --reason slow",),
    "serve": ("tuner serve", "tuner serve --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem"),
    "token create": (
        "tuner token create --name ci --scope read",
        "tuner token create --name ops --scope run --scope promote --expires 12h",
    ),
    "token list": ("tuner token list",),
    "token revoke": ("tuner token revoke 1",),
    "schedule add": ("tuner schedule add night --study chat.yaml --cron '0 1 * * *' --hours 4",),
    "schedule list": ("tuner schedule list",),
    "schedule next": ("tuner schedule next night --count 3",),
    "schedule run": ("tuner schedule run night", "tuner schedule run night --now"),
    "schedule remove": ("tuner schedule remove night",),
    "node list": ("tuner node list",),
    "node add": (
        "tuner node add gpu-1 --python /opt/vllm/bin/python --systemd vllm.service",
        "tuner node add try --card h100-80",
    ),
    "node restore": ("tuner node restore gpu-1", "tuner node restore --all"),
    "gc": ("tuner gc", "tuner gc --days 14 --apply"),
    "completion": ("tuner completion bash", "tuner completion fish"),
    "db upgrade": ("tuner db upgrade",),
    "db backup": ("tuner db backup backup.db", "tuner db backup backups --full"),
    "db restore": ("tuner db restore tuner-full.tar.gz",),
    "db copy": ("tuner db copy postgresql://tuner@db.example.org/tuner",),
}
"""Command → lines that can be typed, the simplest first."""

EXIT_CODES = """\
\b
tuner COMMAND -h shows the options and examples of a command.
Exit codes: 0 done · 1 failed · 2 wrong input · 3 unchanged · 4 not found
5 conflict · 6 try again · 7 no candidate can work · 8 stopped by a signal
9 schedule refused · 10 to 21 doctor found an error
22 and 23 compare --fail-if (docs/ has all)
"""
