{{- define "fastserve.fullname" -}}
{{- if contains "fastserve" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "%s-fastserve" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "fastserve.selector" -}}
app.kubernetes.io/name: fastserve
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "fastserve.labels" -}}
{{ include "fastserve.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "fastserve.image" -}}
{{ .root.Values.image.registry }}{{ .repository }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "fastserve.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "fastserve.fullname" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{/* Of every pod. Variables for services are off: a service named `fastserve` would set FASTSERVE_PORT, a setting. */}}
{{- define "fastserve.pod" -}}
serviceAccountName: {{ include "fastserve.serviceAccount" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: { type: RuntimeDefault }
{{- end }}

{{/* Whether every pipeline has a kvstore of its own on each node: stages of two cannot share an arena. */}}
{{- define "fastserve.kvstorePerReplica" -}}
{{- if and .Values.stages.shareNodes (gt (int .Values.pipeline.replicas) 1) }}true{{ end }}
{{- end }}

{{- define "fastserve.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "fastserve.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
{{- end }}

{{/* What every process of ours has in its environment; the URL of the state may hold a password. */}}
{{- define "fastserve.env" -}}
- name: FASTSERVE_STATE
{{- if .root.Values.redis.enabled }}
  value: redis://{{ include "fastserve.fullname" .root }}-redis:6379/0
{{- else if .root.Values.redis.external.urlSecret }}
  valueFrom: { secretKeyRef: { name: {{ .root.Values.redis.external.urlSecret }}, key: url } }
{{- else }}
  value: {{ required "redis.external.url or redis.external.urlSecret is needed when redis.enabled is false" .root.Values.redis.external.url }}
{{- end }}
- name: POD_IP
  valueFrom: { fieldRef: { fieldPath: status.podIP } }
- name: NODE_NAME
  valueFrom: { fieldRef: { fieldPath: spec.nodeName } }
{{- if .root.Values.clusterTls.secret }}
- { name: FASTSERVE_TLS_CERT, value: /etc/fastserve/cluster/tls.crt }
- { name: FASTSERVE_TLS_KEY, value: /etc/fastserve/cluster/tls.key }
- { name: FASTSERVE_TLS_CA, value: /etc/fastserve/cluster/ca.crt }
- { name: FASTSERVE_TLS_NAME, value: {{ .root.Values.clusterTls.name }} }
{{- end }}
{{- with .extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The certificate that services know each other by. */}}
{{- define "fastserve.clusterTlsMount" -}}
{{- if .Values.clusterTls.secret }}
- { name: cluster-tls, mountPath: /etc/fastserve/cluster, readOnly: true }
{{- end }}
{{- end }}

{{- define "fastserve.clusterTlsVolume" -}}
{{- with .Values.clusterTls.secret }}
- { name: cluster-tls, secret: { secretName: {{ . }}, defaultMode: 288 } }
{{- end }}
{{- end }}

{{/* A probe of gRPC health. The kubelet has no certificate: with them the container asks itself. */}}
{{- define "fastserve.grpcProbe" -}}
{{- if .root.Values.clusterTls.secret }}
exec:
  command: [python, -m, fastserve_common.healthcheck, "127.0.0.1:{{ .port }}"{{ with .service }}, --service={{ . }}{{ end }}]
{{- else }}
grpc: { port: {{ .port }}{{ with .service }}, service: {{ . }}{{ end }} }
{{- end }}
{{- end }}

{{/* Where the prepared model is: another model, another place. */}}
{{- define "fastserve.modelDir" -}}
{{- if .Values.model.path }}/models/{{ .Values.model.path }}
{{- else }}/models/served-{{ .Values.model.name | sha256sum | trunc 12 }}{{ end }}
{{- end }}

{{- define "fastserve.modelVolume" -}}
- name: models
  persistentVolumeClaim:
    claimName: {{ .Values.model.volume.existingClaim | default (printf "%s-models" (include "fastserve.fullname" .)) }}
    readOnly: true
{{- end }}

{{- define "fastserve.waitForModel" -}}
{{- if not .root.Values.model.path }}
initContainers:
  - name: wait-for-model
    image: {{ include "fastserve.image" . }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command:
      - python
      - -c
      - |
        import os, sys, time
        while not os.path.exists(os.path.join(sys.argv[1], "config.json")):
            time.sleep(1)
      - {{ include "fastserve.modelDir" .root }}
    resources:
      requests: { cpu: 10m, memory: 32Mi }
      limits: { memory: 64Mi }
    {{- include "fastserve.container" . | nindent 4 }}
    volumeMounts:
      - { name: models, mountPath: /models, readOnly: true }
{{- end }}
{{- end }}
