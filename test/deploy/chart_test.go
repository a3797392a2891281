//go:build system

package deploy

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"github.com/crust-proxy/crust-proxy/internal/daemon"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/deploy/render"
)

// variants are the chart's defaults and the values files beside it.
func variants(t *testing.T) map[string][]string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(render.Chart(), "ci/*-values.yaml"))
	check.Require(t, err == nil && len(files) != 0, "no values files in the chart's ci directory: %v", err)
	all := map[string][]string{"defaults": nil}
	for _, file := range files {
		all[strings.TrimSuffix(filepath.Base(file), "-values.yaml")] = []string{"--values=" + file}
	}
	return all
}

func TestLint(t *testing.T) {
	for name, args := range variants(t) {
		t.Run(name, func(t *testing.T) {
			lint := []string{"lint", "--strict", "--quiet", "--kube-version=" + render.KubeVersion, render.Chart()}
			_, err := render.Helm(t, append(lint, args...)...)
			check.That(t, err == nil, "%v", err)
		})
	}
}

// TestConfigurationIsTheDaemons has the daemon itself look at the configuration that the chart makes.
func TestConfigurationIsTheDaemons(t *testing.T) {
	for name, args := range variants(t) {
		t.Run(name, func(t *testing.T) {
			for _, one := range render.Objects(t, render.Template(t, args...)) {
				if one.GetKind() == "ConfigMap" && one.GetName() == "crust-proxy" {
					validate(t, one)
				}
			}
		})
	}
}

func validate(t *testing.T, configMap *unstructured.Unstructured) {
	t.Helper()
	text, found, err := unstructured.NestedString(configMap.Object, "data", "config.yaml")
	check.Require(t, err == nil && found, "no config.yaml in %s: %v", configMap.GetName(), err)
	file := filepath.Join(t.TempDir(), "config.yaml")
	check.Must(t, os.WriteFile(file, []byte(text), 0o600))
	var out, complaints strings.Builder
	code := daemon.Main([]string{"validate", "--config", file}, &out, &complaints)
	check.That(t, code == 0, "crust-proxy validate says %d: %s\n%s", code, complaints.String(), text)
}

func TestOnlyTheDaemonSetVariantRuns(t *testing.T) {
	args := variants(t)
	for _, one := range render.Objects(t, render.Template(t, args["node-installed"]...)) {
		switch one.GetKind() {
		case "DaemonSet", "ServiceAccount", "PodMonitor", "Job", "Service":
			t.Errorf("node-installed makes the %s %s", one.GetKind(), one.GetName())
		case "ConfigMap":
			check.That(t, one.GetName() != "crust-proxy", "node-installed makes a configuration that nobody reads")
		}
	}
}

// TestPathsAreTheHosts: records and links hold on both sides only where every path of
// the node is the same in the container; and guards have to reach kubelet.
func TestPathsAreTheHosts(t *testing.T) {
	for _, name := range []string{"defaults", "daemonset", "kubeconfig", "kubelet-directory"} {
		t.Run(name, func(t *testing.T) {
			set := daemonSet(t, render.Objects(t, render.Template(t, variants(t)[name]...)))
			pod := set.Spec.Template.Spec
			host := map[string]string{}
			for _, volume := range pod.Volumes {
				if volume.HostPath != nil {
					host[volume.Name] = volume.HostPath.Path
				}
			}
			propagation, taken := map[string]corev1.MountPropagationMode{}, map[string]bool{}
			for _, mount := range pod.Containers[0].VolumeMounts {
				check.That(t, !taken[mount.MountPath], "two mounts are at %s", mount.MountPath)
				taken[mount.MountPath] = true
				path := host[mount.Name]
				check.That(t, path == "" || path == mount.MountPath, "%s of the node is %s in the container", path, mount.MountPath)
				if mount.MountPropagation != nil {
					propagation[mount.Name] = *mount.MountPropagation
				}
			}
			check.That(t, propagation["kubelet"] == corev1.MountPropagationBidirectional && propagation["run"] == corev1.MountPropagationHostToContainer,
				"mounts are propagated so: %v", propagation)
			check.That(t, *pod.Containers[0].SecurityContext.Privileged, "the container may not mount for the node")
			check.Equal(t, pod.HostPID, name == "daemonset", "the container sees the node's processes") // that one installs crust-runc
		})
	}
}

func daemonSet(t *testing.T, all []*unstructured.Unstructured) *appsv1.DaemonSet {
	t.Helper()
	set := &appsv1.DaemonSet{}
	found := render.Find(t, all, "DaemonSet", "crust-proxy")
	check.Must(t, runtime.DefaultUnstructuredConverter.FromUnstructured(found.Object, set))
	return set
}

// TestOnlyWhatNeedsItRestarts: the policy is taken up by the running daemon.
func TestOnlyWhatNeedsItRestarts(t *testing.T) {
	checksum := func(args ...string) string {
		set := daemonSet(t, render.Objects(t, render.Template(t, args...)))
		return set.Spec.Template.Annotations["crust-proxy.dev/restart-checksum"]
	}
	before := checksum()
	policy := checksum("--set-json", `config.policy.rules=[{"name":"all","defer":true}]`, "--set", "config.log.level=debug")
	check.That(t, before != "" && policy == before, "a changed policy restarts the daemon: %q, then %q", before, policy)
	check.That(t, checksum("--set", "config.front.enabled=false") != before, "a front that is turned off does not restart the daemon")
}

func TestWrongValuesAreRefused(t *testing.T) {
	for what, wrong := range map[string]struct {
		args []string
		want string
	}{
		"a mode":              {[]string{"--set=mode=sidecar"}, "mode"},
		"an unknown value":    {[]string{"--set=daemonSet.hostPID=true"}, "daemonSet"},
		"an unknown key":      {[]string{"--set=config.fronts.enabled=true"}, "fronts"},
		"a relative root":     {[]string{"--set=kubeletRoot=var/lib/kubelet"}, "kubeletRoot"},
		"a source":            {[]string{"--set=cluster.source=webhook"}, "source"},
		"events of nowhere":   {[]string{"--set=cluster.source=none", "--set=cluster.events=true"}, "set cluster.source"},
		"a rule by its needs": {[]string{"--set-json", `config.policy.rules=[{"name":"r","needs":["subPath"],"defer":false}]`}, `the rule "r" goes by the pod`},
		"needs nobody has":    {[]string{"--set-json", `config.policy.rules=[{"name":"r","needs":["subpath"],"defer":false}]`}, `needs`},
		"a rule by the pod":   {[]string{"--set-json", `config.policy.rules=[{"name":"r","runtimeHandlers":["kata"],"defer":true}]`}, `the rule "r" goes by the pod`},
		"crust without its handler": {[]string{"--set=cluster.source=serviceAccount", "--set-json", `config.policy.rules=[{"name":"r","runtimeHandlers":["crust"],"defer":true}]`},
			"set config.handlers.crust.enabled"},
		"crust without processes":           {[]string{"--set=config.handlers.crust.enabled=true"}, "set daemonset.hostPID"},
		"inCluster without an account":      {[]string{"--set=config.cluster.inCluster=true"}, "set that instead"},
		"an account that is not used":       {[]string{"--set=cluster.source=serviceAccount,config.cluster.inCluster=false"}, "set that instead"},
		"a port without probes":             {[]string{"--set=config.http.listen=:9815"}, "kubelet would kill"},
		"an address without probes":         {[]string{"--set=config.http.listen=127.0.0.1:9814"}, "kubelet would kill"},
		"no address":                        {[]string{"--set=config.http.listen="}, "kubelet would kill"},
		"rules that nobody reads":           {[]string{"--set=mode=node-installed", "--set-json", `config.policy.rules=[{"name":"r","defer":true}]`}, "/etc/crust-proxy/config.yaml"},
		"no such API":                       {[]string{"--set=admission.mutate.enabled=true"}, "serves no MutatingAdmissionPolicy"},
		"a word for defer":                  {[]string{"--set=runtimeClasses[0].name=kata,runtimeClasses[0].handler=kata,runtimeClasses[0].defer=some"}, "defer"},
		"a driver's quote":                  {[]string{"--set-json", `admission.nativeDrivers=["x'"]`}, "nativeDrivers"},
		"an old Kubernetes":                 {[]string{"--kube-version=1.29.0"}, "kubeVersion"},
		"no node for volumes":               {[]string{"--set=crustDriver.enabled=true"}, "crustDriver.node"},
		"no certificate":                    {metadata(), "secretName"},
		"no authority":                      {metadata("tls.secretName=tls"), "caCert"},
		"a certificate's name for its text": {metadata("tls.secretName=tls", "tls.caCert=ca.crt"), "caCert"},
		"the API server's audience":         {metadata("audience=https://kubernetes.default.svc"), "audience"},
		"a daemon beside the one before":    {[]string{"--set=daemonset.updateStrategy.rollingUpdate.maxSurge=1"}, "maxSurge"},
		"a class with quote":                {[]string{"--set-json", `runtimeClasses=[{"name":"x'","handler":"x"}]`}, "name"},
	} {
		args := append([]string{"template", "crust-proxy", render.Chart(), "--kube-version=" + render.KubeVersion}, wrong.args...)
		_, err := render.Helm(t, args...)
		check.That(t, err != nil && strings.Contains(err.Error(), wrong.want), "%s: got %v, want an error with %q", what, err, wrong.want)
	}
}

// TestEventsByTheConfiguration: the role fits what the daemon does, whichever value has it done.
func TestEventsByTheConfiguration(t *testing.T) {
	for value, want := range map[string]bool{"cluster.events=true": true, "config.cluster.events=true": true, "cluster.events=false": false} {
		all := render.Objects(t, render.Template(t, "--set=cluster.source=serviceAccount", "--set="+value))
		rules, _, err := unstructured.NestedSlice(render.Find(t, all, "ClusterRole", "crust-proxy").Object, "rules")
		check.That(t, err == nil && strings.Contains(fmt.Sprint(rules), "events") == want, "%s: the rules are %v", value, rules)
	}
}

// rendered is the DaemonSet's pod.
func rendered(t *testing.T, args ...string) corev1.PodSpec {
	return daemonSet(t, render.Objects(t, render.Template(t, args...))).Spec.Template.Spec
}

// TestListenWhereTheProbesAsk: the accepted configuration, or a ConfigMap that is newer than the pod, has another port.
func TestListenWhereTheProbesAsk(t *testing.T) {
	for set, want := range map[string]string{
		"daemonset.port=9900": ":9900", "config.http.listen=192.0.2.7:9900,daemonset.port=9900": "192.0.2.7:9900",
	} {
		args := rendered(t, "--set="+set).Containers[0].Args
		check.That(t, slices.Contains(args, "--http-listen="+want), "%s: the arguments are %q", set, args)
	}
}

// TestInstalledProgramsStay where no new ones can be written: without an exit of 0, the daemon does not start.
func TestInstalledProgramsStay(t *testing.T) {
	script := rendered(t, "--set=crustRunc.install=true").InitContainers[0].Command[2]
	from, dir := t.TempDir(), t.TempDir()
	write := func(dir, text string) {
		for _, name := range []string{"crust-runc", "crust-runc-agent"} {
			check.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o700)) //nolint:gosec // a program
		}
	}
	install := func() (string, error) {
		cmd := exec.Command("busybox", "sh", "-ec", strings.ReplaceAll(script, "/usr/bin/", from+"/"))
		cmd.Env = append(os.Environ(), "DIRECTORY="+dir)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	check.Must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, ""))
	t.Cleanup(func() { check.Must(t, unix.Unmount(dir, 0)) })
	for _, version := range []string{"old", "new", "new"} {
		write(from, version)
		out, err := install()
		got := check.Value(os.ReadFile(filepath.Join(dir, "crust-runc")))(t)
		check.That(t, err == nil && out == "" && string(got) == version, "%s: %q, %v, %s", version, got, err, out)
	}
	check.Must(t, unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	out, err := install()
	check.That(t, err == nil && out == "", "the same programs: %v, %s", err, out)
	write(from, "newer")
	out, err = install()
	check.That(t, err == nil && strings.Contains(out, "stays as it was"), "other programs: %v, %s", err, out)
	check.Must(t, unix.Mount("", dir, "", unix.MS_REMOUNT, "size=64k"))
	check.Must(t, os.WriteFile(filepath.Join(from, "crust-runc"), make([]byte, 1<<20), 0o700)) //nolint:gosec // a program
	out, err = install()
	agent := check.Value(os.ReadFile(filepath.Join(dir, "crust-runc-agent")))(t)
	check.That(t, err == nil && string(agent) == "new", "room for the agent alone: the agent is %q, %v, %s", agent, err, out)
	check.Must(t, os.Remove(filepath.Join(dir, "crust-runc")))
	check.Must(t, unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	check.That(t, check.Err(install()) != nil, "it went on without a program")
}

// TestLongNamesAreCut: names of Jobs and Services become labels and have at most 63
// characters; that of a StatefulSet has 52, for its pods have it with a hash in a label.
func TestLongNamesAreCut(t *testing.T) {
	args := append(metadata("tls.secretName=tls", "tls.caCert=-----BEGIN CERTIFICATE-----\n"), "--set=mode=daemonset",
		"--set=fullnameOverride="+strings.Repeat("long-", 20))
	most, seen := map[string]int{"Job": 63, "Service": 63, "StatefulSet": 52}, map[string]bool{}
	for _, one := range render.Objects(t, render.Template(t, args...)) {
		kind, name := one.GetKind(), one.GetName()
		seen[kind] = true
		limit := most[kind]
		check.That(t, limit <= 0 || len(name) <= limit, "a %s is called %s, with %d characters", kind, name, len(name))
	}
	for kind := range most {
		check.That(t, seen[kind], "there is no %s", kind)
	}
}

// metadata are arguments that turn the changed blocks on, with values of theirs.
func metadata(values ...string) []string {
	args := []string{"--set=crustDriver.enabled=true,crustDriver.node=a,crustDriver.snapshotMetadata.enabled=true"}
	for _, one := range values {
		args = append(args, "--set=crustDriver.snapshotMetadata."+one)
	}
	return args
}

// TestTheServedVersionIsTaken: v1 where the cluster has it, else v1beta1.
func TestTheServedVersionIsTaken(t *testing.T) {
	const group = "admissionregistration.k8s.io/"
	for want, served := range map[string][]string{"v1": {"v1beta1", "v1"}, "v1beta1": {"v1beta1"}} {
		args := []string{"--set=admission.mutate.enabled=true"}
		for _, version := range served {
			args = append(args, "--api-versions="+group+version+"/MutatingAdmissionPolicy")
		}
		policy := render.Find(t, render.Objects(t, render.Template(t, args...)), "MutatingAdmissionPolicy", "crust-proxy-defer")
		check.That(t, policy.GetAPIVersion() == group+want, "of %v it took %s", served, policy.GetAPIVersion())
	}
}

func TestMonitoringIsTheProjects(t *testing.T) {
	kustomize := render.Kustomizations(t) // made of the packaged chart
	all := render.Objects(t, render.Kustomize(t, filepath.Join(kustomize, "monitoring")))
	board, _, err := unstructured.NestedString(render.Find(t, all, "ConfigMap", "crust-proxy-dashboard").Object, "data", "crust-proxy.json")
	check.That(t, err == nil && board == read(t, filepath.Join(render.Root(), "deploy/monitoring/dashboard.json")),
		"the packaged dashboard is not deploy/monitoring/dashboard.json: %v", err)
	want := map[string]any{}
	check.Must(t, yaml.Unmarshal([]byte(read(t, filepath.Join(render.Root(), "deploy/monitoring/alerts.yaml"))), &want))
	diff := cmp.Diff(want, render.Find(t, all, "PrometheusRule", "crust-proxy").Object["spec"])
	check.That(t, diff == "", "the packaged alerts are not deploy/monitoring/alerts.yaml: %s", diff)
}

func read(t *testing.T, path string) string {
	t.Helper()
	return string(check.Value(os.ReadFile(path))(t))
}
