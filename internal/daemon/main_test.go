package daemon

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestWrongCommandLinesSayWhatIsRight(t *testing.T) {
	for line, want := range map[string]string{
		"valdate":                 `no command "valdate"; there are validate, version, removable, removable-nodes, withdraw`,
		"version now":             "version takes no arguments",
		"removable-nodes":         "removable-nodes takes HOST:PORT",
		"removable-nodes a b c d": "removable-nodes takes HOST:PORT",
		"--no-such-flag":          "--no-such-flag",
		"version --pod x":         "--pod is for validate",
	} {
		code, said := askMain(t, strings.Fields(line)...)
		check.That(t, code == exitUsage && strings.Contains(said, want) && strings.Contains(said, "see crust-proxy --help"),
			"%s: exit code %d: %s", line, code, said)
	}
}

// TestHelpCanBePaged: what is asked for goes to stdout.
func TestHelpCanBePaged(t *testing.T) {
	var out, complaints strings.Builder
	code := Main([]string{"--help"}, &out, &complaints)
	check.That(t, code == exitOK && complaints.Len() == 0 && strings.Contains(out.String(), "--config"),
		"exit code %d, %q on stdout, %q on stderr", code, out.String(), complaints.String())
}

// TestValidateSaysWhatItChecked: without --config it is not the service's file.
func TestValidateSaysWhatItChecked(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	check.Must(t, os.WriteFile(file, []byte("reconcileInterval: 0s\n"), 0o600))
	for want, args := range map[string][]string{
		"# the defaults and flags alone: no --config is given; the service reads /etc/crust-proxy/config.yaml\n": {"validate"},
		"# " + file + ", with the defaults and flags\n":                                                          {"validate", "--config", file},
		"# reconcileInterval: 0 is never":                                                                        {"validate", "--config", file},
	} {
		code, said := askMain(t, args...)
		check.That(t, code == exitOK && strings.Contains(said, want), "%q: exit code %d, %q is not in\n%s", args, code, want, said)
	}
}

// TestValidateKnowsTheNode: what is missing is said, and is no error, because the daemon starts without.
func TestValidateKnowsTheNode(t *testing.T) {
	dir := t.TempDir()
	file, kubeconfig := filepath.Join(dir, "config.yaml"), filepath.Join(dir, "kubelet.conf")
	for path, text := range map[string]string{kubeconfig: "{", file: `runDir: /proc/crust
kubeletRoot: ` + dir + `/kubelet
runtimeSocket: {path: ` + dir + `/none/runtime.sock}
adminSocket: {path: ` + kubeconfig + `}
containerd: {socket: ` + dir + `/containerd.sock}
cluster: {kubeconfig: ` + kubeconfig + `}
front: {enabled: true}
handlers: {crust: {enabled: true, programs: [` + dir + `/runc], filesystems: [nofs]}}
`} {
		check.Must(t, os.WriteFile(path, []byte(text), 0o600))
	}
	code, said := askMain(t, "validate", "--config", file)
	for _, want := range []string{
		"runDir: /proc/crust is not on tmpfs", "kubeletRoot: stat " + dir + "/kubelet: no such file", "runtimeSocket.path: stat " + dir + "/none: no such",
		"adminSocket.path: " + kubeconfig + " is not a socket", "containerd.socket: stat " + dir,
		"cluster.kubeconfig: the kubeconfig " + kubeconfig + " cannot be used", "handlers.crust.programs[0]: stat " + dir + "/runc",
		"handlers.*.filesystems: mkfs.nofs is not installed",
	} {
		check.That(t, strings.Contains(said, "\n# on this node: "+want) && code == exitOK, "exit code %d, %q is not in\n%s", code, want, said)
	}
	code, said = askMain(t, "validate", "--quiet", "--config", file)
	check.That(t, code == exitOK && said == "", "quiet: exit code %d, %q", code, said)
}

// TestValidateExplainsAPod: before it exists. A claim that is not bound yet has what its StorageClass will make.
func TestValidateExplainsAPod(t *testing.T) {
	dir := t.TempDir()
	pod := dir + "/pod.yaml"
	for name, text := range map[string]string{"pod.yaml": aPod, "on.yaml": ourRules + "cluster: {inCluster: true}\n", "off.yaml": ourRules, "none.yaml": "kind: Service\napiVersion: v1\n", "secret.yaml": "kind: Secret\nstringData: {a: b}\n",
		"odd.yaml": strings.Replace(aPod, "runtimeClassName", "runtimeclass", 1), "two.yaml": aPod + "---" + aPod, "classless.yaml": strings.Replace(aPod, "RuntimeClass", "PriorityClass", 1)} {
		check.Must(t, os.WriteFile(dir+"/"+name, []byte(text), 0o600))
	}
	for want, args := range map[string][]string{`
data: deferred to the handler kata
    not rule "once": accessModes: it has SINGLE_NODE_WRITER, and the rule wants ReadWriteOncePod
    not rule "sub-paths": needs: it has none, and the rule wants subPath
    by rule "kata"
with a driver that reports SINGLE_NODE_MULTI_WRITER, data: on the host
    by rule "once"
logs: on the host
    not rule "once": accessModes: it has SINGLE_NODE_WRITER, and the rule wants ReadWriteOncePod
    by rule "sub-paths"
scratch: refused
    not rule "once": accessModes: it has MULTI_NODE_MULTI_WRITER, and the rule wants ReadWriteOncePod
    not rule "sub-paths": needs: it has none, and the rule wants subPath
    by rule "kata"
    (volume) volume scratch: it is to be deferred (rule "kata"), and its access mode MULTI_NODE_MULTI_WRITER lets several nodes write, which destroys a ` +
		`filesystem on a device: use ReadWriteOnce or ReadWriteOncePod, or exclude it by a policy rule
lost: refused
    (pods) the claim lost is not in the file
`: {"--config", dir + "/on.yaml", "--pod", pod},
		`it goes by runtimeHandlers of the pod, which is not known here: configure cluster`: {"--config", dir + "/off.yaml", "--pod", pod},
		"pod.yaml: no such file":                                    {"--pod", "/nowhere/pod.yaml"},
		"a document in it has no kind or apiVersion\n":              {"--pod", dir + "/on.yaml"},
		"secret.yaml: a document in it has no kind or apiVersion\n": {"--pod", dir + "/secret.yaml"},
		"there is no Pod in it":                                     {"--pod", dir + "/none.yaml"},
		"there are several Pods in it":                              {"--pod", dir + "/two.yaml"},
		`unknown field "spec.runtimeclass"`:                         {"--pod", dir + "/odd.yaml"},
		"has the runtime class kata-fast, which does not exist":     {"--pod", dir + "/classless.yaml"},
	} {
		code, said := askMain(t, append([]string{"validate"}, args...)...)
		check.That(t, strings.Contains(said, want) && (code == exitOK) == strings.Contains(said, " rule "),
			"%q: exit code %d, not in\n%s", want, code, said)
	}
}

const (
	ourRules = `front: {enabled: true}
policy:
  rules:
    - {name: once, accessModes: [ReadWriteOncePod], defer: false}
    - {name: sub-paths, runtimeHandlers: [kata], needs: [subPath], defer: false}
    - {name: kata, runtimeHandlers: [kata], defer: true}
`
	aPod = `
{"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "kata-fast"}, "handler": "kata"}
---
{"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "fast"}, "provisioner": "d.example.com"}
---
{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "db"}, "spec": {"accessModes": ["ReadWriteOncePod"], "storageClassName": "fast"}}
---
{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "logs"}, "spec": {"volumeName": "pv-1"}}
---
{"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "pv-1"}, "spec": {"accessModes": ["ReadWriteOnce"], "csi": {"driver": "d.example.com", "volumeHandle": "vol-1"}}}
---
apiVersion: v1
kind: Pod
metadata: {name: db-0, namespace: shop}
spec:
  runtimeClassName: kata-fast
  containers:
    - {name: main, image: db, volumeMounts: [{name: data, mountPath: /data}, {name: logs, mountPath: /logs, subPath: db}]}
  volumes:
    - {name: data, persistentVolumeClaim: {claimName: db}}
    - {name: logs, persistentVolumeClaim: {claimName: logs}}
    - {name: scratch, ephemeral: {volumeClaimTemplate: {spec: {accessModes: [ReadWriteMany], storageClassName: fast}}}}
    - {name: lost, persistentVolumeClaim: {claimName: lost}}
`
)

// TestValidateRefusesWhatAStartRefuses in lines that an editor can follow, also if nothing else is to be shown.
func TestValidateRefusesWhatAStartRefuses(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	check.Must(t, os.WriteFile(file, []byte("log:\n  level: loud\nhtp: {}\n"), 0o600))
	want := file + ":2:3: log.level: \"loud\" is none of debug, info, warn, error\n" + file + ":3:1: htp: unknown key; did you mean http?\n"
	code, said := askMain(t, "validate", "-q", "--config", file)
	check.That(t, code == exitError && said == want, "exit code %d, %q", code, said)
	code, said = askMain(t, "--config", file) // in the format of the log
	for line := range strings.Lines(said) {
		check.That(t, code == exitError && strings.Contains(line, `"level":"error"`) && strings.Contains(line, `"file":"`+file+`","line":`),
			"a start: exit code %d, %q", code, said)
	}
	code, said = askMain(t, "validate", "-q", "--run-dir", stateWith(t, "lvm/p1"))
	check.That(t, code == exitError && strings.Contains(said, "front.enabled: false (the default) cannot be put in force: 1 deferred volume(s)"),
		"a front with volumes is left: exit code %d, %q", code, said)
}
