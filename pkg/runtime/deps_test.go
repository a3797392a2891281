package runtime_test

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestAuthorsImportNoBroker: a runtime or shim that imports abi or oci is a program
// that is started for each container. It gets neither the broker nor gRPC with them.
func TestAuthorsImportNoBroker(t *testing.T) {
	const module = "github.com/crust-proxy/crust-proxy/"
	allowed := map[string]bool{
		"pkg/volume": true, "pkg/volume/mountopt": true, "pkg/runtime/abi": true, "pkg/runtime/oci": true,
		"internal/ground/sys": true, // of the standard library and golang.org/x/sys alone
	}
	for _, name := range []string{"abi", "oci"} {
		out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "./"+name).Output()
		check.Require(t, err == nil, "go list: %v", err)
		deps := strings.Fields(string(out))
		check.Require(t, len(deps) >= 10, "%s has only %d dependencies", name, len(deps))
		for _, dep := range deps {
			own, ours := strings.CutPrefix(dep, module)
			check.That(t, (!ours || allowed[own]) && !strings.HasPrefix(dep, "google.golang.org/") && !strings.HasPrefix(dep, "go.uber.org/"),
				"%s imports %s", name, dep)
		}
	}
}
