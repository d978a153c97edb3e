module heteroinfer.dev/tests/cluster/tools/scheduler-plugins

go 1.25.0

require sigs.k8s.io/scheduler-plugins v0.33.5
