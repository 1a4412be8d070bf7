"""What pods fetch of the models that a Serve config names, in the manifests that fetch."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_WRITTEN = "# Written by k8s/generate.py from the models of cluster/serve-gpu.yaml.\n"
_SMALL = ("*.json", "*.txt", "*.model", "*.jinja")
"""Configuration, tokenizer and chat template of a checkpoint: all that routers and drafts need of the target's."""
_ROOM_GI = {"router": 8, "draft": 16, "target": 120}
"""Of each pool's volume where every pod fetches for itself."""

_CONFINED = """allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
seccompProfile: {type: RuntimeDefault}
"""
_TOKEN = (
    "{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: paceline-hugging-face, key: token, optional: true}}}"
    " # for gated models"
)


@dataclass(frozen=True)
class Models:
    """Ids of the Hugging Face hub; what has another place, such as a folder or the embedded pair, is not among them."""

    target: str | None
    draft: str | None
    tokenizers: tuple[str, ...] = ()

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> Models:
        """The models of the arguments of the application, a ServiceConfig as it is written."""
        target = args["target_config"]["model_loading_config"]
        draft = (args.get("draft_config") or {}).get("model_loading_config") or {}
        tokenizers = (_hub(part.get("tokenizer_source")) for part in (target, draft))
        return cls(_source(target), _source(draft), tuple(name for name in tokenizers if name))

    def fetches(self, pool: str) -> list[str]:
        """Commands that fetch what a pool needs. Routers and drafts need the target's tokenizer and configuration."""
        whole = {"router": (), "draft": (self.draft,), "target": (self.target,)}[pool]
        parts = dict.fromkeys(name for name in (self.target, *self.tokenizers) if name and name not in whole)
        return [_download(name, _SMALL) for name in parts] + [_download(name) for name in whole if name]


def _source(loading: Mapping[str, Any]) -> str | None:
    return _hub(loading.get("model_source") or loading.get("model_id"))


def _hub(name: str | None) -> str | None:
    return None if name is None or name.startswith((".", "/", "~", "paceline/")) else name


def _download(name: str, patterns: tuple[str, ...] = ()) -> str:
    included = "".join(f' --include "{pattern}"' for pattern in patterns)  # the option takes one value each
    return f"hf download {shlex.quote(name)}{included}"


def _indent(text: str, by: int) -> str:
    return "".join(" " * by + line for line in text.splitlines(keepends=True))


def _script(commands: list[str], by: int) -> str:
    return "|\n" + _indent("\n".join(commands or ["true"]), by)


# -- every pod for itself --------------------------------------------------------------------------------------------


def fetch_patch(models: Models) -> str:
    """Init containers that fetch into a volume of the pod's own."""
    text = _WRITTEN + "# Worker groups of the base, in its order.\n"
    for number, pool in enumerate(("router", "draft", "target")):
        spec = f"/spec/rayClusterConfig/workerGroupSpecs/{number}/template/spec"
        text += f"""- op: replace # of {pool}s: the volume claim
  path: {spec}/volumes/3
  value: {{name: models, emptyDir: {{sizeLimit: {_ROOM_GI[pool]}Gi}}}}
- op: replace
  path: {spec}/containers/0/volumeMounts/3
  value: {{name: models, mountPath: /models}}
- op: replace # the volume above, /tmp and /cache: the scheduler takes a node that has so much
  path: {spec}/containers/0/resources/requests/ephemeral-storage
  value: {_ROOM_GI[pool] + 20}Gi
- op: add
  path: {spec}/initContainers/-
  value:
    name: fetch-models
    image: paceline # the one of the head, see kustomization.yaml
    imagePullPolicy: IfNotPresent
    command:
      - bash
      - -ec
      - {_script(models.fetches(pool), 8)}
    env:
      - {{name: HF_HOME, value: /models}}
      - {{name: HOME, value: /tmp}}
      - {_TOKEN}
    resources:
      requests: {{cpu: "1", memory: 2Gi, ephemeral-storage: {_ROOM_GI[pool] + 20}Gi}}
      limits: {{cpu: "4", memory: 4Gi}}
    securityContext:
{_indent(_CONFINED, 6)}    volumeMounts: [{{name: models, mountPath: /models}}, {{name: tmp, mountPath: /tmp}}]
"""
    return text


# -- a job that fills the volume of all ------------------------------------------------------------------------------


def _all(models: Models) -> list[str]:
    return list(dict.fromkeys([*models.fetches("target"), *models.fetches("draft"), *models.fetches("router")]))


def _folders(models: Models) -> list[str]:
    names = dict.fromkeys(name for name in (models.target, models.draft, *models.tokenizers) if name)
    return ["hub/models--" + name.replace("/", "--") for name in names]


def _from_s3(models: Models) -> list[str]:
    copy = 'aws s3 sync --only-show-errors --exclude "blobs/*"'  # what blobs hold, snapshots have as files
    return [f'{copy} "$PACELINE_MODELS/{folder}" /models/{folder}' for folder in _folders(models)]


def _from_gs(models: Models) -> list[str]:
    key = "/secrets/key"
    credentials = f"if [ -e {key} ]; then export CLOUDSDK_AUTH_CREDENTIAL_FILE_OVERRIDE={key}; fi"
    copy = 'gcloud storage rsync --recursive --exclude "^blobs/"'
    lines = [credentials]
    for folder in _folders(models):
        lines += [f"mkdir -p /models/{folder}", f'{copy} "$PACELINE_MODELS/{folder}" /models/{folder}']
    return lines


def fill_jobs(models: Models) -> dict[str, str]:
    """Component -> the job that fills the claim ``paceline-models`` from the hub, from S3 or from Cloud Storage."""
    address = "{name: PACELINE_MODELS, valueFrom: {configMapKeyRef: {name: paceline-models-source, key: address}}}"
    keys = "envFrom: [{secretRef: {name: paceline-s3, optional: true}}] # else the service account's identity\n"
    key = "{name: secrets, mountPath: /secrets, readOnly: true}"
    secret = "{name: secrets, secret: {secretName: paceline-gs, optional: true}}"
    return {
        "model-fill": _job("paceline", _all(models), [_TOKEN]),
        "model-fill-s3": _job("public.ecr.aws/aws-cli/aws-cli:2.27.0", _from_s3(models), [address], more=keys),
        "model-fill-gs": _job(
            "gcr.io/google.com/cloudsdktool/google-cloud-cli:525.0.0-slim",
            _from_gs(models),
            [address],
            (key,),
            (secret,),
        ),
    }


def _job(
    image: str,
    commands: list[str],
    environment: list[str],
    mounts: tuple[str, ...] = (),
    volumes: tuple[str, ...] = (),
    more: str = "",
) -> str:
    variables = "".join(f"            - {entry}\n" for entry in environment)
    mounted = ", ".join(("{name: models, mountPath: /models}", "{name: tmp, mountPath: /tmp}", *mounts))
    own = "".join(f"        - {volume}\n" for volume in volumes)
    return f"""{_WRITTEN}# For other models delete the job and apply it again: it fetches what is missing.
apiVersion: batch/v1
kind: Job
metadata: {{name: paceline-models, namespace: paceline, labels: {{app.kubernetes.io/part-of: paceline}}}}
spec:
  backoffLimit: 10
  template:
    metadata: {{labels: {{app.kubernetes.io/part-of: paceline, paceline/job: models}}}}
    spec:
      restartPolicy: OnFailure
      serviceAccountName: paceline-models
      automountServiceAccountToken: false
      enableServiceLinks: false
      securityContext:
        runAsNonRoot: true
        runAsUser: 1000
        runAsGroup: 100
        fsGroup: 100
        seccompProfile: {{type: RuntimeDefault}}
      containers:
        - name: fill
          image: {image}
          imagePullPolicy: IfNotPresent
          command:
            - bash
            - -ec
            - {_script(commands, 14)}
          env:
            - {{name: HF_HOME, value: /models}}
            - {{name: HOME, value: /tmp}}
{variables}{_indent(more, 10)}          resources:
            requests: {{cpu: "1", memory: 2Gi}}
            limits: {{cpu: "4", memory: 8Gi}}
          securityContext:
{_indent(_CONFINED, 12)}          volumeMounts: [{mounted}]
      volumes:
        - {{name: models, persistentVolumeClaim: {{claimName: paceline-models}}}}
        - {{name: tmp, emptyDir: {{sizeLimit: 20Gi}}}}
{own}---
apiVersion: v1
kind: ServiceAccount
metadata: {{name: paceline-models, namespace: paceline, labels: {{app.kubernetes.io/part-of: paceline}}}}
automountServiceAccountToken: false
"""


# -- a copy on each machine ------------------------------------------------------------------------------------------

_KINDS = {"tokenizers": ("router",), "weights": ("router", "draft", "target")}
"""Value of the node label ``paceline/models`` -> the pools whose models such a node keeps."""


def _mark(models: Models, pool: str) -> str:
    """The file that says that all that a pool needs is there; another one for other models."""
    digest = hashlib.sha256("\n".join(models.fetches(pool)).encode()).hexdigest()[:12]
    return f"/models/.complete-{pool}-{digest}"


def node_cache(models: Models) -> str:
    """A DaemonSet for each kind of node, which fetches into a folder of the machine."""
    texts = []
    for kind, pools in _KINDS.items():
        commands = []
        for pool in pools:
            commands += [*models.fetches(pool), f"touch {_mark(models, pool)}"]
        labels = f"app.kubernetes.io/part-of: paceline, paceline/node-cache: {kind}"
        texts.append(f"""apiVersion: apps/v1
kind: DaemonSet
metadata: {{name: paceline-{kind}, labels: {{{labels}}}}}
spec:
  selector: {{matchLabels: {{paceline/node-cache: {kind}}}}}
  updateStrategy: {{rollingUpdate: {{maxUnavailable: 100%}}}}
  template:
    metadata: {{labels: {{{labels}}}}}
    spec:
      nodeSelector: {{paceline/models: {kind}}}
      tolerations: [{{operator: Exists}}]
      automountServiceAccountToken: false
      enableServiceLinks: false
      securityContext: {{runAsUser: 0, runAsGroup: 0, seccompProfile: {{type: RuntimeDefault}}}} # the folder is root's
      initContainers:
        - &fetch
          name: fetch-models
          image: paceline
          imagePullPolicy: IfNotPresent
          command:
            - bash
            - -ec
            - {_script(commands, 14)}
          env:
            - {{name: HF_HOME, value: /models}}
            - {{name: HOME, value: /tmp}}
            - {_TOKEN}
          resources: {{requests: {{cpu: "1", memory: 2Gi}}, limits: {{cpu: "4", memory: 8Gi}}}}
          securityContext:
            allowPrivilegeEscalation: false
            capabilities: {{drop: [ALL]}}
            readOnlyRootFilesystem: true
          volumeMounts: [{{name: models, mountPath: /models}}, {{name: tmp, mountPath: /tmp}}]
      containers:
        - <<: *fetch
          name: keep
          command: [sleep, infinity]
          resources: {{requests: {{cpu: 1m, memory: 8Mi}}, limits: {{cpu: 10m, memory: 16Mi}}}}
      volumes:
        - {{name: models, hostPath: {{path: /var/lib/paceline/models, type: DirectoryOrCreate}}}}
        - {{name: tmp, emptyDir: {{sizeLimit: 1Gi}}}}
""")
    return _WRITTEN + "---\n".join(texts)


def wait_patch(models: Models) -> str:
    """Init containers that wait until the machine has what the pod needs."""
    text = _WRITTEN + "# Worker groups of the base, in its order.\n"
    for number, pool in enumerate(("router", "draft", "target")):
        mark = _mark(models, pool)
        text += f"""- op: add
  path: /spec/rayClusterConfig/workerGroupSpecs/{number}/template/spec/initContainers/-
  value:
    name: wait-for-models
    image: paceline # the one of the head, see kustomization.yaml
    imagePullPolicy: IfNotPresent
    command:
      - bash
      - -ec
      - |
        until [ -e {mark} ]; do
          echo "waiting for {mark}: is the node labelled paceline/models, and k8s/node-cache applied?"
          sleep 5
        done
    resources: {{requests: {{cpu: 10m, memory: 16Mi}}, limits: {{cpu: 100m, memory: 64Mi}}}}
    securityContext:
{_indent(_CONFINED, 6)}    volumeMounts: [{{name: models, mountPath: /models, readOnly: true}}]
"""
    return text
