// Package sanity runs csi-sanity against a CSI socket, and tells which of its specs ran.
package sanity

import (
	"encoding/xml"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/crust-proxy/crust-proxy/internal/front/passthrough"
	csiv1 "github.com/crust-proxy/crust-proxy/proto/crust/csi/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// Program builds csi-sanity, which is pinned in a module of its own, if it has changed.
func Program(t testing.TB) string {
	t.Helper()
	root := check.Value(filepath.Abs("../.."))(t)
	program := filepath.Join(root, "bin/tests/csi-sanity")
	check.Run(t, exec.Command("go", "build", "-modfile="+root+"/tools/csi-sanity/go.mod", "-o", program, "github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity"))
	return program
}

// Run runs it and gives how many specs ran, and the names of those skipped.
func Run(t testing.TB, program, dir, socket, kind string) (ran int, skipped []string) {
	t.Helper()
	report, mutable := dir+"/report.xml", dir+"/mutable.yaml"
	check.Must(t, os.WriteFile(mutable, []byte(`directIO: "false"`), 0o600))
	cmd := exec.Command(program, "--csi.endpoint", "unix://"+socket, "--csi.mountdir", dir+"/mnt", "--csi.stagingdir", dir+"/stage",
		"--csi.testvolumesize", "335544320", "--csi.testvolumeexpandsize", "671088640", "--csi.testvolumeaccesstype", kind,
		"--csi.testvolumemutableparameters", mutable,
		"--ginkgo.junit-report", report, "--ginkgo.no-color")
	out, err := cmd.CombinedOutput()
	check.That(t, err == nil, "csi-sanity: %v\n%s", err, out)
	raw := check.Value(os.ReadFile(report))(t)
	var suites struct {
		Suites []struct {
			Cases []struct {
				Name   string `xml:"name,attr"`
				Status string `xml:"status,attr"`
			} `xml:"testcase"`
		} `xml:"testsuite"`
	}
	check.Must(t, xml.Unmarshal(raw, &suites))
	for _, suite := range suites.Suites {
		for _, spec := range suite.Cases {
			name, isSpec := strings.CutPrefix(spec.Name, "[It] ")
			switch {
			case !isSpec: // hooks of the suite
			case spec.Status == "passed":
				ran++
			case spec.Status == "skipped" || spec.Status == "pending":
				skipped = append(skipped, name)
			default:
				t.Errorf("%s: %s", spec.Status, name)
			}
		}
	}
	slices.Sort(skipped)
	return ran, skipped
}

// HideDeferral stands before a native driver and takes the values of deferral out
// of its capabilities, and counts them: csi-sanity fails on any value that CSI does not
// have. Local has what is answered in the driver's place; all else passes as it is.
func HideDeferral(t testing.TB, conn grpc.ClientConnInterface, dir string, local map[string]passthrough.Local) (socket string, hidden *atomic.Int64) {
	t.Helper()
	hide, hidden := rig.Hide(csi.NodeServiceCapability_RPC_Type(csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS))
	all := map[string]passthrough.Local{csi.Node_NodeGetCapabilities_FullMethodName: hide}
	maps.Copy(all, local)
	socket = dir + "/plain.sock"
	rig.Before(t, conn, socket, all)
	return socket, hidden
}
