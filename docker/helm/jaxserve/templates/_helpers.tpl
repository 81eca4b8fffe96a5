{{- define "jaxserve.labels" -}}
app: {{ .Release.Name }}
app.kubernetes.io/name: jaxserve
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* An environment variable's value: whole numbers without an exponent. */ -}}
{{- define "jaxserve.value" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . | quote }}{{ else }}{{ toString . | quote }}{{ end -}}
{{- end }}

{{- /* "true" for replicas over several hosts each, else nothing. */ -}}
{{- define "jaxserve.severalHosts" -}}
{{- if gt (int .Values.hosts) 1 }}true{{ end -}}
{{- end }}

{{- /* "true" for pods with TPUs, else nothing. */ -}}
{{- define "jaxserve.tpu" -}}
{{- if hasKey (.Values.resources.limits | default dict) "google.com/tpu" }}true{{ end -}}
{{- end }}

{{- /* Seconds before SIGTERM, until no Service and no gateway sends to a pod. */ -}}
{{- define "jaxserve.unroutedAfter" -}}
5
{{- end }}

{{- /* Seconds before SIGTERM of a worker. It ends shutdown_timeout after that: later than its leader, whose end may begin after the worker's. */ -}}
{{- define "jaxserve.workerWait" -}}
15
{{- end }}

{{- /* Seconds until a pod is killed: the wait before SIGTERM, its running requests, and the end of its processes. */ -}}
{{- define "jaxserve.gracePeriod" -}}
{{- add (include "jaxserve.unroutedAfter" .) (ceil (dig "shutdown_timeout" 30 .Values.settings)) 25 -}}
{{- end }}

{{- /* Seconds in which Ray moves everything off a node that gets SIGTERM: the running requests of its replicas, and their end. */ -}}
{{- define "jaxserve.rayDrain" -}}
{{- add (ceil (dig "drain_timeout_s" 600 .Values.settings)) 60 -}}
{{- end }}

{{- /* Seconds until a pod of Ray is killed. */ -}}
{{- define "jaxserve.rayGracePeriod" -}}
{{- add (include "jaxserve.rayDrain" .) 30 -}}
{{- end }}

{{- define "jaxserve.rayDrainVariable" -}}
# After SIGTERM; Ray's own default is 30.
- name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
  value: {{ include "jaxserve.rayDrain" . | quote }}
{{- end }}

{{- /* The name of the LeaderWorkerSet. Its controller makes a headless Service of the same name. */ -}}
{{- define "jaxserve.leaderWorkerSet" -}}
{{ .Release.Name }}-hosts
{{- end }}

{{- define "jaxserve.pickerName" -}}
{{ .Values.gateway.picker.name | default (printf "%s-picker" .Release.Name) }}
{{- end }}

{{- /* The image of a container. */ -}}
{{- define "jaxserve.image" -}}
image: {{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- if ne .Values.image.pullPolicy "IfNotPresent" }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}
{{- end }}

{{- /* What all pods have in common, those of Ray and its head too. */ -}}
{{- define "jaxserve.pod" -}}
# Else a Service of this name sets JAXSERVE_PORT, to something else than a port.
enableServiceLinks: false
securityContext:
  {{- if include "jaxserve.tpu" . }}
  # Root alone may raise the limit of locked memory, and open the chips' files under /dev.
  runAsUser: 0
  {{- else }}
  runAsNonRoot: true
  runAsUser: 10001
  {{- end }}
  # The group of the image's folders, for which the server trusts its compiled programs.
  fsGroup: 0
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* Where pods with devices run, perhaps nothing. */ -}}
{{- define "jaxserve.placement" -}}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}

{{- /* The server's keys, from the secret: never in a document or a command line. */ -}}
{{- define "jaxserve.apiKey" -}}
- name: JAXSERVE_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ .Values.secretName }}
      key: api-key
      optional: true
{{- end }}

{{- /* Variables of other programs than the server. */ -}}
{{- define "jaxserve.env" -}}
{{- range $name, $value := .Values.env }}
- name: {{ $name }}
  value: {{ include "jaxserve.value" $value }}
{{- end }}
{{- end }}

{{- define "jaxserve.hubToken" -}}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.secretName }}
      key: hf-token
      optional: true
{{- end }}

{{- /* The headless Service of all replicas that exchange KV pages. */ -}}
{{- define "jaxserve.kvService" -}}
{{ .Release.Name }}-kv
{{- end }}

{{- /* Where a pod serves KV pages, and from whom it fetches them: the Service's name stands for all pods, itself left out. */ -}}
{{- define "jaxserve.kvPeers" -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: JAXSERVE_KV_LISTEN
  value: $(POD_IP):{{ .Values.kvPeers.port }}
- name: JAXSERVE_KV_PEERS
  value: {{ include "jaxserve.kvService" . }}:{{ .Values.kvPeers.port }}
- name: JAXSERVE_KV_PEER_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.secretName }}
      key: kv-peer-token
{{- end }}

{{- define "jaxserve.volumeMounts" -}}
- name: tmp
  mountPath: /tmp
- name: models
  mountPath: /cache/hf
- name: programs
  mountPath: /cache/programs
{{- if .Values.sharedMemory }}
- name: shm
  mountPath: /dev/shm
{{- end }}
{{- end }}

{{- define "jaxserve.volumes" -}}
- name: tmp
  emptyDir: {}
- name: models
  persistentVolumeClaim:
    claimName: {{ .Release.Name }}-models
- name: programs
  persistentVolumeClaim:
    claimName: {{ .Release.Name }}-programs
{{- with .Values.sharedMemory }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ . }}
{{- end }}
{{- end }}

{{- /* The pod template of a Deployment, and of a LeaderWorkerSet's leaders and workers. A list of the root and whether the pod answers HTTP. */ -}}
{{- define "jaxserve.podTemplate" -}}
{{- $root := first . }}
{{- $answersHttp := last . }}
{{- $tpu := include "jaxserve.tpu" $root }}
{{- with $root -}}
metadata:
  labels:
    app: {{ .Release.Name }}
    {{- if $answersHttp }}
    inference.networking.k8s.io/engine-type: jaxserve
    {{- end }}
spec:
  {{- with include "jaxserve.placement" . }}
  {{- . | nindent 2 }}
  {{- end }}
  # Of a worker the leader's: its requests need all hosts until they have ended.
  terminationGracePeriodSeconds: {{ include "jaxserve.gracePeriod" . }}
  automountServiceAccountToken: false
  {{- include "jaxserve.pod" . | nindent 2 }}
  containers:
    - name: jaxserve
      {{- include "jaxserve.image" . | nindent 6 }}
      {{- if $tpu }}
      # libtpu locks memory that the chips read and write; containers may lock little unless they raise the limit.
      command: [sh, -c, "ulimit -l 68719476736; exec jaxserve serve"]
      {{- end }}
      env:
        - name: JAXSERVE_MODEL
          value: {{ .Values.model | quote }}
        {{- range $name, $value := .Values.settings }}
        - name: JAXSERVE_{{ upper $name }}
          value: {{ include "jaxserve.value" $value }}
        {{- end }}
        {{- with include "jaxserve.env" . }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- include "jaxserve.apiKey" . | nindent 8 }}
        {{- include "jaxserve.hubToken" . | nindent 8 }}
        {{- if .Values.kvPeers.enabled }}
        {{- include "jaxserve.kvPeers" . | nindent 8 }}
        {{- end }}
      {{- if $answersHttp }}
      ports:
        - name: http
          containerPort: 8000
        {{- if .Values.kvPeers.enabled }}
        - name: kv
          containerPort: {{ .Values.kvPeers.port }}
        {{- end }}
      # No pod is restarted while a model is fetched, loaded and compiled.
      startupProbe:
        httpGet:
          path: /ready
          port: http
        periodSeconds: 5
        failureThreshold: {{ div .Values.startup.timeout 5 }}
      readinessProbe:
        httpGet:
          path: /ready
          port: http
        periodSeconds: 5
      # 200 also while an engine is started again inside the pod.
      livenessProbe:
        httpGet:
          path: /live
          port: http
        periodSeconds: 10
        timeoutSeconds: 5
      {{- end }}
      lifecycle:
        preStop:
          exec:
            {{- if $answersHttp }}
            # Until no Service and no gateway sends here: from SIGTERM on new requests get 503.
            command: [sleep, {{ include "jaxserve.unroutedAfter" . | quote }}]
            {{- else }}
            # A worker ends shutdown_timeout after SIGTERM, so it gets that later than the leader.
            command: [sleep, {{ include "jaxserve.workerWait" . | quote }}]
            {{- end }}
      resources:
        {{- toYaml .Values.resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
          {{- if $tpu }}
          add: [SYS_RESOURCE]
          {{- end }}
      volumeMounts:
        {{- include "jaxserve.volumeMounts" . | nindent 8 }}
  volumes:
    {{- include "jaxserve.volumes" . | nindent 4 }}
{{- end }}
{{- end }}

{{- /* Fails for values that differ from their defaults and have no effect. A list of the root, the reason, and paths of values. */ -}}
{{- define "jaxserve.refuseUnused" -}}
{{- $root := first . }}
{{- $reason := index . 1 }}
{{- $defaults := $root.Files.Get "files/defaults.yaml" | fromYaml }}
{{- range $path := slice . 2 }}
{{- $value := $root.Values }}
{{- $default := $defaults }}
{{- range $name := splitList "." $path }}
{{- $value = index $value $name }}
{{- $default = index $default $name }}
{{- end }}
{{- if ne (toJson $value) (toJson $default) }}
{{- fail (printf "%s %s" $path $reason) }}
{{- end }}
{{- end }}
{{- end }}
