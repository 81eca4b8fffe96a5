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
