"""Shapes of a target on Kubernetes: how many ranks it has, and how many of them share a pod."""

from __future__ import annotations

import math
from dataclasses import dataclass

import yaml

_RANKS = "tensor_parallel_size: 8  # one bundle each, all on one host"
_GROUP = "/spec/rayClusterConfig/workerGroupSpecs/2"
_CORES, _MEMORY_GI, _SHM_GI = 5, 60, 8
"""Of a pod for each of its GPUs: cores, memory, and of the memory what ranks of one host may share."""


@dataclass(frozen=True)
class TargetShape:
    """A target of so many ranks in pods of so many GPUs. ``product``: the label of their nodes; None: that of ``gpu``.

    ``interface`` and ``fabric`` (a device plugin's resource, ``NAME=N`` for each pod) concern targets of several pods.
    """

    tensor_parallel_size: int
    gpus_per_pod: int
    product: str | None = None
    interface: str = "eth0"
    fabric: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a target that does not fill its pods."""
        ranks, gpus = self.tensor_parallel_size, self.gpus_per_pod
        if not 2 <= ranks <= 64:
            raise ValueError(f"tensor-parallel-size is {ranks}: it must be 2 to 64")
        if gpus < 1 or ranks % gpus:
            raise ValueError(f"gpus-per-pod is {gpus}: it must divide tensor-parallel-size, which is {ranks}")
        if self.fabric is not None and not self.fabric.partition("=")[2].isdigit():
            raise ValueError(f"fabric is {self.fabric}: it must be NAME=N, such as vpc.amazonaws.com/efa=32")

    @property
    def pods(self) -> int:
        """Pods of one target."""
        return self.tensor_parallel_size // self.gpus_per_pod

    def serve_config(self, text: str) -> str:
        """The Serve config with targets of this shape."""
        if text.count(_RANKS) != 1:
            raise ValueError(f"{_RANKS!r} is {text.count(_RANKS)} times in the Serve config: it must be once")
        where = "all on one host" if self.pods == 1 else f"on {self.pods} hosts"
        text = text.replace(_RANKS, f"tensor_parallel_size: {self.tensor_parallel_size}  # one bundle each, {where}")
        if self.pods == 1:
            return text
        target = yaml.safe_load(text)["applications"][0]["args"]["target_config"]
        actor = target["deployment_config"]["ray_actor_options"]
        before, after = text.split("deployment_config:", 1)  # the target's, which comes first
        indent = before[before.rindex("\n") :]
        bundles = [f"    - {{CPU: {actor['num_cpus']}, GPU: {actor['num_gpus']}}}"] * self.tensor_parallel_size
        lines = [
            "placement_group_config:",
            f"  strategy: PACK  # STRICT_PACK wants one host; {self.gpus_per_pod} bundles fill a pod",
            "  bundles:",
            *bundles,
            "deployment_config:",
        ]
        return before + indent.join(lines) + after

    def group_patch(self, serve_config: str) -> str:
        """The group of targets in the RayService, as a JSON patch."""
        deployment = yaml.safe_load(serve_config)["applications"][0]["args"]["target_config"]["deployment_config"]
        scaling, gpus = deployment["autoscaling_config"], self.gpus_per_pod
        surge = math.ceil(scaling["max_replicas"] * deployment.get("max_surge_percent", 0) / 100)
        name, _, number = (self.fabric or "").partition("=")
        devices = f", nvidia.com/gpu: {gpus}" + (f", {name}: {number}" if self.fabric else "")
        resources = f'cpu: "{_CORES * gpus}", memory: {_MEMORY_GI * gpus}Gi'
        container = f"{_GROUP}/template/spec/containers/0"
        lines = [
            "# Written by k8s/generate.py: a target's ranks, and the pods that they fill.",
            *_replace(f"{_GROUP}/rayStartParams/num-cpus", f'"{deployment["ray_actor_options"]["num_cpus"] * gpus}"'),
            *_replace(f"{_GROUP}/replicas", scaling["min_replicas"] * self.pods),
            *_replace(f"{_GROUP}/minReplicas", scaling["min_replicas"] * self.pods),
            *_replace(f"{_GROUP}/maxReplicas", (scaling["max_replicas"] + surge) * self.pods),
            *_replace(f"{container}/resources/requests", f"{{{resources}, ephemeral-storage: 20Gi{devices}}}"),
            *_replace(f"{container}/resources/limits", f"{{{resources}{devices}}}"),
            *_replace(f"{_GROUP}/template/spec/initContainers/0/resources/requests/nvidia.com~1gpu", gpus),
            *_replace(f"{_GROUP}/template/spec/initContainers/0/resources/limits/nvidia.com~1gpu", gpus),
            *_replace(f"{_GROUP}/template/spec/volumes/2/emptyDir/sizeLimit", f"{_SHM_GI * gpus}Gi"),
        ]
        if self.product is not None:
            lines += _replace(f"{_GROUP}/template/spec/nodeSelector", f"{{nvidia.com/gpu.product: {self.product}}}")
        return "\n".join(lines) + "\n"

    def kustomization(self, base: str) -> str:
        """The overlay, ``base``: the folder of ``gpu`` as seen from it."""
        text = (
            "# Written by k8s/generate.py: "
            f"gpu with targets of {self.tensor_parallel_size} ranks, {self.gpus_per_pod} in a pod.\n"
            "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nnamespace: paceline\n"
            f"resources: [{base}]\n"
            "patches:\n  - path: serve.yaml\n  - path: target.yaml\n"
            "    target: {kind: RayService, name: paceline}\n"
        )
        if self.pods == 1:
            return text
        return text + (
            "configMapGenerator: # ranks of two hosts meet on this interface, whatever else their machines have\n"
            "  - name: paceline-environment\n    behavior: merge\n"
            f"    literals: [NCCL_SOCKET_IFNAME={self.interface}, GLOO_SOCKET_IFNAME={self.interface}]\n"
        )


def _replace(path: str, value: object) -> list[str]:
    return ["- op: replace", f"  path: {path}", f"  value: {value}"]


SHAPES = {
    "gpu-tp4": TargetShape(tensor_parallel_size=4, gpus_per_pod=4),
    "gpu-two-hosts": TargetShape(tensor_parallel_size=8, gpus_per_pod=4, product="NVIDIA-A100-SXM4-80GB"),
}
"""Overlays of ``gpu`` with other targets."""
