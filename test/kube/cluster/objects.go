//go:build system

package cluster

import (
	"fmt"
	"strings"
)

// Runtime classes.
const (
	Crust = "crust"
	Runc  = "" // what pods get that ask for nothing
)

// objects are what an administrator makes once.
func objects() string {
	var out strings.Builder
	fmt.Fprintf(&out, "apiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata: {name: %s}\nhandler: %s\n", Crust, Crust)
	fmt.Fprint(&out, "---\napiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata: {name: runc}\nhandler: runc\n")
	for _, name := range []string{Block, Native, Plain} {
		fmt.Fprintf(&out, `---
apiVersion: storage.k8s.io/v1
kind: CSIDriver
metadata: {name: %[1]s}
spec:
  attachRequired: false
  podInfoOnMount: %[2]t
  fsGroupPolicy: File
  volumeLifecycleModes: [Persistent, Ephemeral]
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: %[1]s}
provisioner: %[1]s
reclaimPolicy: Retain
allowVolumeExpansion: true
`, name, name != Block)
	}
	return out.String()
}
