"""Scales a Deployment or StatefulSet by the Kubernetes API: `python -m tuner.fleet.scaling VERB RESOURCE`.

Hand-over hooks run it as a command of their own. It uses the service account of its pod, else the kubeconfig
(`pip install 'vllm-config-tuner[kubernetes]'`).
"""

import sys
from collections.abc import Sequence
from typing import Any

KINDS = {"deployment": "deployment", "statefulset": "stateful_set"}
TIMEOUT_S = 20
PROBLEM = 1


def main(words: Sequence[str]) -> int:
    """Run `ask`, `scale N` or `ready` for NAMESPACE/KIND/NAME. The answer is on standard output; a problem is
    on standard error with exit code 1.
    """
    verb, resource, *rest = words
    namespace, kind, name = resource.split("/")
    suffix = KINDS[kind.removesuffix("s")]
    try:
        return _do(verb, _api(), suffix, {"name": name, "namespace": namespace}, rest)
    except Exception as error:  # the client's errors have no common ancestor
        said = getattr(error, "reason", None) or str(error)
        print(f"{resource}: {' '.join(str(said).split())}", file=sys.stderr)
        return PROBLEM


def _do(verb: str, api: Any, suffix: str, which: dict[str, str], rest: Sequence[str]) -> int:
    where = {**which, "_request_timeout": TIMEOUT_S}
    if verb == "scale":
        body = {"spec": {"replicas": int(rest[0])}}
        getattr(api, f"patch_namespaced_{suffix}_scale")(body=body, **where)
        return 0
    found = getattr(api, f"read_namespaced_{suffix}")(**where)
    if verb == "ask":
        print(found.spec.replicas)
        return 0
    status = found.status
    seen = (status.observed_generation or 0) >= found.metadata.generation
    ready, updated = status.ready_replicas or 0, status.updated_replicas or 0
    if seen and ready == updated == found.spec.replicas == (status.replicas or 0):
        return 0
    print(f"{ready} of {found.spec.replicas} replicas are ready", file=sys.stderr)
    return PROBLEM


def _api() -> Any:
    import kubernetes

    client: Any = kubernetes  # an extra, without types
    try:
        client.config.load_incluster_config()
    except client.config.ConfigException:
        client.config.load_kube_config()
    return client.client.AppsV1Api()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
