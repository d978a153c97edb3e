module heteroinfer.dev/tests/cluster/tools/kueue

go 1.25.0

require sigs.k8s.io/kueue v0.15.0
