//go:build system

// Package sanity runs csi-sanity against a CSI socket, and tells which of its
// specs ran.
package sanity

import (
	"context"
	"encoding/xml"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	csiv1 "github.com/crust-proxy/crust-proxy/proto/crust/csi/v1"
)

// Program builds csi-sanity, which is pinned in a module of its own.
func Program(t testing.TB) string {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "csi-sanity")
	cmd := exec.Command("go", "build", "-modfile="+root+"/tools/csi-sanity/go.mod", "-o", program, "github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build csi-sanity: %v\n%s", err, out)
	}
	return program
}

// Run runs it and gives how many specs ran, and the names of those skipped.
func Run(t testing.TB, program, dir, socket, kind string) (ran int, skipped []string) {
	t.Helper()
	report, mutable := dir+"/report.xml", dir+"/mutable.yaml"
	if err := os.WriteFile(mutable, []byte(`directIO: "false"`), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "--csi.endpoint", "unix://"+socket, "--csi.mountdir", dir+"/mnt", "--csi.stagingdir", dir+"/stage",
		"--csi.testvolumesize", "335544320", "--csi.testvolumeexpandsize", "671088640", "--csi.testvolumeaccesstype", kind,
		"--csi.testvolumemutableparameters", mutable,
		"--ginkgo.junit-report", report, "--ginkgo.no-color")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("csi-sanity: %v\n%s", err, out)
	}
	raw, err := os.ReadFile(report)
	if err != nil {
		t.Fatal(err)
	}
	var suites struct {
		Suites []struct {
			Cases []struct {
				Name   string `xml:"name,attr"`
				Status string `xml:"status,attr"`
			} `xml:"testcase"`
		} `xml:"testsuite"`
	}
	if err := xml.Unmarshal(raw, &suites); err != nil {
		t.Fatal(err)
	}
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
// of its capabilities: csi-sanity fails on any value that CSI does not have. All
// else passes as it is.
func HideDeferral(t testing.TB, conn grpc.ClientConnInterface, dir string) string {
	t.Helper()
	socket, hidden := Relay(t, conn, dir, nil)
	t.Cleanup(func() {
		if *hidden == 0 {
			t.Error("the driver never reported DEFER_FS_OPS")
		}
	})
	return socket
}

// Relay is the same with something around each call, and tells how often the
// values were hidden.
func Relay(
	t testing.TB, conn grpc.ClientConnInterface, dir string, around func(req any, call func() error) error,
) (socket string, hidden *int) {
	t.Helper()
	hidden = new(int)
	if around == nil {
		around = func(_ any, call func() error) error { return call() }
	}
	const least = csi.NodeServiceCapability_RPC_Type(csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS)
	relay := func(ctx context.Context, req any, info *grpc.UnaryServerInfo, _ grpc.UnaryHandler) (any, error) {
		reply, err := replyOf(info.FullMethod)
		if err != nil {
			return nil, err
		}
		if err := around(req, func() error { return conn.Invoke(ctx, info.FullMethod, req, reply) }); err != nil {
			return nil, err
		}
		if capabilities, ok := reply.(*csi.NodeGetCapabilitiesResponse); ok {
			before := len(capabilities.GetCapabilities())
			capabilities.Capabilities = slices.DeleteFunc(capabilities.Capabilities, func(one *csi.NodeServiceCapability) bool {
				return one.GetRpc().GetType() == least
			})
			*hidden += before - len(capabilities.GetCapabilities())
		}
		return reply, nil
	}
	socket = dir + "/plain.sock"
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.UnaryInterceptor(relay))
	csi.RegisterIdentityServer(server, csi.UnimplementedIdentityServer{})
	csi.RegisterControllerServer(server, csi.UnimplementedControllerServer{})
	csi.RegisterGroupControllerServer(server, csi.UnimplementedGroupControllerServer{})
	csi.RegisterNodeServer(server, csi.UnimplementedNodeServer{})
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		<-done
	})
	return socket, hidden
}

// replyOf makes the answer message of a method such as /csi.v1.Node/NodeGetInfo.
func replyOf(method string) (proto.Message, error) {
	name := protoreflect.FullName(strings.ReplaceAll(strings.TrimPrefix(method, "/"), "/", "."))
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(name)
	if err != nil {
		return nil, err
	}
	called, ok := found.(protoreflect.MethodDescriptor)
	if !ok {
		return nil, fmt.Errorf("%s is no method", method)
	}
	made, err := protoregistry.GlobalTypes.FindMessageByName(called.Output().FullName())
	if err != nil {
		return nil, err
	}
	return made.New().Interface(), nil
}
