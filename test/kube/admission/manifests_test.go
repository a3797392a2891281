//go:build system

package admission

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/deploy/render"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

// foreignTypes are types of other projects that the manifests use.
var foreignTypes = []struct{ group, version, kind, plural, scope, schema string }{
	{"monitoring.coreos.com", "v1", "PodMonitor", "podmonitors", "Namespaced", anything},
	{"monitoring.coreos.com", "v1", "ServiceMonitor", "servicemonitors", "Namespaced", anything},
	{"monitoring.coreos.com", "v1", "PrometheusRule", "prometheusrules", "Namespaced", anything},
	{"cert-manager.io", "v1", "Certificate", "certificates", "Namespaced", anything},
	{"snapshot.storage.k8s.io", "v1", "VolumeSnapshotClass", "volumesnapshotclasses", "Cluster", anything},
	{"cbt.storage.k8s.io", "v1beta1", "SnapshotMetadataService", "snapshotmetadataservices", "Cluster", `{type: object, required: [spec], properties: {
		spec: {type: object, required: [address, audience, caCert], properties: {
			address: {type: string}, audience: {type: string}, caCert: {type: string, format: byte}}}}}`},
}

// anything is the schema of types whose own is not repeated here.
const anything = `{type: object, x-kubernetes-preserve-unknown-fields: true}`

func (r *rig) defineForeignTypes(t *testing.T) {
	t.Helper()
	var plurals []string
	for _, one := range foreignTypes {
		plurals = append(plurals, one.plural)
		check.Must(t, r.Apply(fmt.Sprintf(`apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: %[4]s.%[1]s
  annotations: {api-approved.kubernetes.io: unapproved}
spec:
  group: %[1]s
  scope: %[5]s
  names: {kind: %[3]s, plural: %[4]s}
  versions:
    - name: %[2]s
      served: true
      storage: true
      schema:
        openAPIV3Schema: %[6]s
`, one.group, one.version, one.kind, one.plural, one.scope, strings.ReplaceAll(one.schema, "\t", " "))))
	}
	// Established is one thing, to be found by clients another.
	await(t, "the types of other projects", func() bool {
		_, err := r.Kubectl("get", strings.Join(plurals, ","), "--all-namespaces")
		return err == nil
	})
}

// TestManifestsAreAccepted applies all that kustomize makes, with unknown fields being errors.
func TestManifestsAreAccepted(t *testing.T) {
	r := start(t)
	r.defineForeignTypes(t)
	r.makeNamespaces(t, "crust-proxy", "backup", "shop")
	root := render.Kustomizations(t)
	served, other := "defer-by-class", "defer-by-class-v1beta1"
	if cluster.Beta {
		served, other = other, served
	}
	for file, class := range map[string]string{"kata.yaml": "kata-qemu", "crust.yaml": "crust"} {
		made := "apiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata: {name: " + class + "}\nhandler: " + class + "\n"
		check.Must(t, check.Err(r.Kubectl("apply", "--server-side", "-f", manifest(t, made))))
		_, err := r.Kubectl("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "../../../examples/kubernetes/"+file)
		check.That(t, err == nil, "%s: %v", file, err)
		check.Must(t, check.Err(r.Kubectl("delete", "runtimeclass", class)))
	}
	for _, dir := range []string{
		"admission", "daemonset", served, "examples/behind-the-front/behind", "examples/behind-the-front/direct",
		"examples/behind-the-front/driver", "examples/changed-blocks", "examples/crust", "monitoring", "networkpolicy", "node-installed", "runtimeclasses",
	} {
		said, err := r.Kubectl("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", manifest(t, render.Kustomize(t, filepath.Join(root, dir))))
		check.That(t, err == nil, "%s: %v", dir, err)
		check.That(t, !strings.Contains(said, "Warning"), "%s: %s", dir, said)
	}
	// What this release does not serve may differ in nothing but its version.
	inBeta := func(dir string) string {
		return strings.ReplaceAll(render.Kustomize(t, filepath.Join(root, dir)), "admissionregistration.k8s.io/v1\n", "admissionregistration.k8s.io/v1beta1\n")
	}
	check.That(t, inBeta(served) == inBeta(other), "%s and %s differ in more than their version", served, other)
}

func (r *rig) makeNamespaces(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		check.Must(t, check.Err(r.Kubectl("create", "namespace", name)))
	}
}

func manifest(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "manifest.yaml")
	check.Must(t, os.WriteFile(file, []byte(text), 0o600))
	return file
}

// TestChartComesAndGoes installs every variant, each over the one before, as one does
// who changes values, and removes the last.
func TestChartComesAndGoes(t *testing.T) {
	r := start(t)
	r.defineForeignTypes(t)
	version := "v1"
	if cluster.Beta {
		version = "v1beta1"
	}
	files, err := filepath.Glob(filepath.Join(render.Chart(), "ci/*-values.yaml"))
	check.Require(t, err == nil && len(files) != 0, "no values files: %v", err)
	for _, file := range files {
		// What the cluster serves is asked of the cluster.
		r.install(t, "--reset-values", "--values="+file, "--set=admission.mutate.apiVersion=")
		policy := manifest(t, render.Template(t, "--values="+file, "--set=admission.mutate.apiVersion=admissionregistration.k8s.io/"+version))
		_, err := r.Kubectl("apply", "--dry-run=server", "--validate=strict", "--namespace=crust-proxy", "-f", policy)
		check.That(t, err == nil, "%s: %v", filepath.Base(file), err)
	}
	check.Must(t, check.Err(render.Helm(t, "uninstall", "crust-proxy", "--namespace=crust-proxy", "--kubeconfig="+r.AdminKubeconfig)))
	left, err := r.Kubectl("get", "--all-namespaces", "--ignore-not-found", "--selector=app.kubernetes.io/name=crust-proxy", "--output=name",
		"daemonsets,statefulsets,snapshotmetadataservices,certificates,configmaps,serviceaccounts,services,clusterroles,clusterrolebindings,runtimeclasses,csidrivers,"+
			"validatingadmissionpolicies,validatingadmissionpolicybindings,mutatingadmissionpolicies,mutatingadmissionpolicybindings,"+
			"podmonitors,servicemonitors,prometheusrules")
	check.That(t, err == nil && left == "", "after the chart was removed, there is %q: %v", left, err)
}
