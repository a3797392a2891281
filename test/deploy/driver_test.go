//go:build system

package deploy

import (
	"encoding/base64"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/reference/driver"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/deploy/render"
)

// crustDriver is what the chart makes for the reference driver.
type crustDriver struct {
	all        []*unstructured.Unstructured
	pod        corev1.PodSpec
	containers map[string]corev1.Container
}

func renderDriver(t *testing.T, args ...string) crustDriver {
	t.Helper()
	d := crustDriver{all: render.Objects(t, render.Template(t, append(variants(t)["crust-driver"], args...)...)), containers: map[string]corev1.Container{}}
	set := &appsv1.StatefulSet{}
	found := render.Find(t, d.all, "StatefulSet", "crust-proxy-driver")
	check.Must(t, runtime.DefaultUnstructuredConverter.FromUnstructured(found.Object, set))
	d.pod = set.Spec.Template.Spec
	for _, one := range d.pod.Containers {
		d.containers[one.Name] = one
	}
	return d
}

// text gives a field of an object that was rendered.
func (d crustDriver) text(t *testing.T, kind, name string, path ...string) string {
	t.Helper()
	value, _, err := unstructured.NestedString(render.Find(t, d.all, kind, name).Object, path...)
	check.Must(t, err)
	return value
}

// flag gives the value of a container's flag.
func (d crustDriver) flag(t *testing.T, container, name string) string {
	t.Helper()
	for _, arg := range d.containers[container].Args {
		if value, ok := strings.CutPrefix(arg, "--"+name+"="); ok {
			return value
		}
	}
	t.Errorf("the container %s has no --%s", container, name)
	return ""
}

// TestCrustDriverIsFound: kubelet, the front and the sidecars look for the driver where it is.
func TestCrustDriverIsFound(t *testing.T) {
	d := renderDriver(t)
	var complaints strings.Builder
	code := driver.Main(append(slices.Clone(d.containers["crust-driver"].Args), "--version"), &complaints, &complaints)
	check.That(t, code == 0, "crust-driver does not take its arguments: %s", complaints.String())
	check.Equal(t, d.text(t, "CSIDriver", driver.DefaultName, "metadata", "name"), driver.DefaultName, "the CSIDriver is")
	check.Equal(t, d.flag(t, "csi-snapshotter", "timeout"), "2m", "the time of a snapshot, for which a sandbox has to write its data first")
	socket := d.flag(t, "crust-driver", "kubelet-endpoint")
	endpoint := d.flag(t, "crust-driver", "endpoint")
	check.That(t, endpoint == "unix://"+socket, "it serves %s, and kubelet looks for %s", endpoint, socket)
	dir := filepath.Dir(d.flag(t, "crust-driver", "kubelet-registration-socket"))
	check.That(t, dir == config.Default().Front.Registry, "it registers in %s, and the front waits in %s", dir, config.Default().Front.Registry)
	plugin := d.volume(t, "plugin").HostPath
	check.That(t, plugin != nil && plugin.Path == filepath.Dir(socket), "the sidecars see %v at /csi, and the driver's socket is %s", plugin, socket)
	for name := range d.containers {
		check.That(t, name == "crust-driver" || d.flag(t, name, "csi-address") == "/csi/csi.sock", "%s looks elsewhere", name)
	}
}

// TestPreventPodSchedulingIfMissing: older clusters do not know the field, and most autoscalers neither.
func TestPreventPodSchedulingIfMissing(t *testing.T) {
	for _, set := range []bool{false, true} {
		d := renderDriver(t, "--set", fmt.Sprintf("csiDriver.preventPodSchedulingIfMissing=%t", set))
		got, rendered, err := unstructured.NestedBool(render.Find(t, d.all, "CSIDriver", driver.DefaultName).Object, "spec", "preventPodSchedulingIfMissing")
		check.That(t, err == nil && got == set && rendered == set, "%t: rendered %t, %v", set, rendered, err)
	}
}

func (d crustDriver) volume(t *testing.T, name string) corev1.VolumeSource {
	t.Helper()
	at := slices.IndexFunc(d.pod.Volumes, func(v corev1.Volume) bool { return v.Name == name })
	check.Require(t, at >= 0, "there is no volume %s", name)
	return d.pod.Volumes[at].VolumeSource
}

// TestChangedBlocksAreFound: the object by which backup software finds the service says
// what the Service, the certificate and the sidecar are.
func TestChangedBlocksAreFound(t *testing.T) {
	d := renderDriver(t)
	const name = "crust-proxy-snapshot-metadata"
	const host = name + ".crust-proxy.svc"
	for what, is := range map[string][2]string{
		"audience": {d.text(t, "SnapshotMetadataService", driver.DefaultName, "spec", "audience"), d.flag(t, "csi-snapshot-metadata", "audience")},
		"address":  {d.text(t, "SnapshotMetadataService", driver.DefaultName, "spec", "address"), host + ":6443"},
		"secret":   {d.text(t, "Certificate", name, "spec", "secretName"), d.volume(t, "tls").Secret.SecretName},
	} {
		check.That(t, is[0] != "" && is[0] == is[1], "the %s is %q here and %q there", what, is[0], is[1])
	}
	names, _, _ := unstructured.NestedStringSlice(render.Find(t, d.all, "Certificate", name).Object, "spec", "dnsNames")
	check.That(t, slices.Contains(names, host), "the certificate is for %q, and callers want %s", names, host)
	authority, err := base64.StdEncoding.DecodeString(d.text(t, "SnapshotMetadataService", driver.DefaultName, "spec", "caCert"))
	check.That(t, err == nil && strings.HasPrefix(string(authority), "-----BEGIN CERTIFICATE-----\n"), "callers get %q as authority: %v", authority, err)
	d.wantServed(t, name)
}

// wantServed: the Service leads to the port on which the sidecar serves.
func (d crustDriver) wantServed(t *testing.T, name string) {
	t.Helper()
	service := &corev1.Service{}
	check.Must(t, runtime.DefaultUnstructuredConverter.FromUnstructured(render.Find(t, d.all, "Service", name).Object, service))
	for _, port := range d.containers["csi-snapshot-metadata"].Ports {
		if port.Name == service.Spec.Ports[0].TargetPort.StrVal {
			got := d.flag(t, "csi-snapshot-metadata", "port")
			check.That(t, got == "50051" && port.ContainerPort == 50051,
				"the sidecar serves on %s, and the Service leads to %d", got, port.ContainerPort)
			return
		}
	}
	t.Errorf("no port of the sidecar is %q", service.Spec.Ports[0].TargetPort.StrVal)
}

// TestOwnSecret: whoever has no cert-manager names a Secret.
func TestOwnSecret(t *testing.T) {
	d := renderDriver(t, "--set=crustDriver.snapshotMetadata.tls.issuerRef=null", "--set=crustDriver.snapshotMetadata.tls.secretName=mine")
	got := d.volume(t, "tls").Secret.SecretName
	check.That(t, got == "mine", "the sidecar has the certificate of %q", got)
	for _, one := range d.all {
		check.That(t, one.GetKind() != "Certificate", "cert-manager is asked for a certificate")
	}
}
