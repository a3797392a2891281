// Package render makes the manifests of deploy/ with the tools that are pinned, as a user would.
package render

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// KubeVersion is the cluster that charts are rendered for where a test has none.
const KubeVersion = "1.34.4"

// Root is the project's directory.
var Root = sync.OnceValue(func() string {
	_, here, _, _ := runtime.Caller(0)
	return filepath.Clean(filepath.Join(filepath.Dir(here), "../../.."))
})

// Chart is the chart's directory.
func Chart() string { return filepath.Join(Root(), "deploy/helm/crust-proxy") }

var (
	helm      = sync.OnceValues(func() (string, error) { return tool("helm") })
	kustomize = sync.OnceValues(func() (string, error) { return tool("kustomize") })
)

// tool builds a tool, if it is not in Go's cache, and gives its path.
func tool(name string) (string, error) {
	cmd := exec.Command("go", "tool", "-n", "-modfile=tools/kube-deploy/go.mod", name)
	cmd.Dir = Root()
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("go tool %s: %w: %s", name, err, complaints(err))
	}
	return strings.TrimSpace(string(out)), nil
}

func complaints(err error) []byte {
	if exit, is := errors.AsType[*exec.ExitError](err); is {
		return exit.Stderr
	}
	return nil
}

// Helm runs helm and gives what it wrote; its complaints are in the error.
func Helm(t rig.T, args ...string) (string, error) {
	t.Helper()
	cmd := exec.Command(check.Value(helm())(t), args...)
	home := t.TempDir() // helm keeps its files of the user out of the way
	cmd.Env = append(os.Environ(), "HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home)
	out, err := cmd.Output()
	if err != nil {
		return string(out), fmt.Errorf("helm %s: %w: %s%s", strings.Join(args, " "), err, complaints(err), out)
	}
	return string(out), nil
}

// Template renders the chart as a release crust-proxy; args are helm's.
func Template(t rig.T, args ...string) string {
	t.Helper()
	out := check.Value(Helm(t, append([]string{
		"template", "crust-proxy", Chart(), "--namespace=crust-proxy", "--kube-version=" + KubeVersion,
	}, args...)...))(t)
	return out
}

// Kustomizations renders deploy/kustomize, as make deploy does, and gives the directory.
func Kustomizations(t rig.T) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "kustomize")
	cmd := exec.Command(filepath.Join(Root(), "hack/kustomize.sh"), out)
	cmd.Env = append(os.Environ(), "HELM="+check.Value(helm())(t))
	check.Run(t, cmd)
	return out
}

// Kustomize builds a directory.
func Kustomize(t rig.T, dir string) string {
	t.Helper()
	out, err := exec.Command(check.Value(kustomize())(t), "build", dir).Output()
	if err != nil {
		t.Fatalf("kustomize build %s: %v: %s", dir, err, complaints(err))
	}
	return string(out)
}

// Objects reads the objects of a YAML stream.
func Objects(t rig.T, stream string) []*unstructured.Unstructured {
	t.Helper()
	var all []*unstructured.Unstructured
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewBufferString(stream), 4096)
	for {
		one := map[string]any{}
		err := decoder.Decode(&one)
		if errors.Is(err, io.EOF) {
			return all
		}
		check.Must(t, err)
		if len(one) > 0 {
			all = append(all, &unstructured.Unstructured{Object: one})
		}
	}
}

// Find gives the object of that kind and name.
func Find(t rig.T, all []*unstructured.Unstructured, kind, name string) *unstructured.Unstructured {
	t.Helper()
	for _, one := range all {
		if one.GetKind() == kind && one.GetName() == name {
			return one
		}
	}
	t.Fatalf("no %s %s was rendered", kind, name)
	return nil
}
