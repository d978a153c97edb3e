module heteroinfer.dev/tests/cluster/tools/keda

go 1.25.0

require github.com/kedacore/keda/v2 v2.21.0
