package config

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func load(t *testing.T, file string, args ...string) (Config, error) {
	t.Helper()
	set := pflag.NewFlagSet("test", pflag.ContinueOnError)
	flags := AddFlags(set)
	if file != "" {
		path := filepath.Join(t.TempDir(), "config.yaml")
		check.Must(t, os.WriteFile(path, []byte(file), 0o600))
		args = append(args, "--config", path)
	}
	check.Must(t, set.Parse(args))
	return flags.Load()
}

func TestDefaultsAreValidAndSurviveTheirYAML(t *testing.T) {
	text := check.Value(Default().YAML())(t)
	for _, file := range []string{"", text, "\n", "# only a comment\n", "{}", "---\n", "relay:\n", "reconcileInterval:\n"} {
		got, err := load(t, file)
		diff := cmp.Diff(Default(), got)
		check.That(t, err == nil && diff == "", "%q: %v %s", file, err, diff)
	}
}

func TestFlagsWinOverTheFile(t *testing.T) {
	got := check.Value(load(t, "runDir: /run/a\nlog: {level: warn}\nrelay: {statsTimeout: 3s}\n", "--run-dir", "/run/b"))(t)
	check.That(t, got.RunDir == "/run/b" && got.Log.Level == "warn" && got.Relay.StatsTimeout == 3*time.Second &&
		got.Relay.ExpandTimeout == Default().Relay.ExpandTimeout, "got %+v", got)
}

func TestBadFilesAreRefusedByKey(t *testing.T) {
	for file, want := range map[string]string{
		"runDir: /run/../x":                                                                      "runDir",
		"runtimeSocket: {path: \"@abstract\"}":                                                   "runtimeSocket.path",
		"runtimeSocket: {mode: \"0666\"}":                                                        "runtimeSocket.mode",
		"runtimeSocket: {path: /" + strings.Repeat("x", 120) + "}":                               "runtimeSocket.path",
		"runtimeSocket: {group: disk}":                                                           "runtimeSocket.group",
		"adminSocket: {path: /run/crust-proxy/runtime.sock}":                                     "adminSocket.path",
		"authorization: {admin: {uids: [], gids: []}}":                                           "authorization.admin",
		"devices: {roots: [dev]}":                                                                "devices.roots[0]",
		"devices: {images: [/]}":                                                                 "devices.images",
		"handlers: {default: runc}":                                                              "handlers.default",
		"handlers: {kata: {enabled: false}}":                                                     "handlers.kata.enabled",
		"handlers: {kata: {filesystems: []}}":                                                    "handlers.kata.filesystems",
		"handlers: {default: crust}":                                                             "handlers.default",
		"handlers: {default: kata, kata: {enabled: false}, crust: {enabled: true}}":              "handlers.default",
		"handlers: {crust: {enabled: true, root: run}}":                                          "handlers.crust.root",
		"handlers: {crust: {programs: [crust-runc]}}":                                            "handlers.crust.programs[0]",
		"handlers: {crust: {programs: [], socketDirs: []}}":                                      "handlers.crust.programs",
		"handlers: {crust: {socketDirs: [/run/../x]}}":                                           "handlers.crust.socketDirs[0]",
		"handlers: {crust: {tempDir: /run/crust/tmp}}":                                           "handlers.crust.tempDir",
		"handlers: {crust: {filesystems: [EXT4]}}":                                               "handlers.crust.filesystems[0]",
		"handlers: {crust: {root: /run/kata-containers}}":                                        "handlers.crust.root",
		"handlers: {kata: {filesystems: [\"a,b\"]}}":                                             "handlers.kata.filesystems[0]",
		"handlers: {kata: {tempDir: /run/kata-containers/shared/direct-volumes/x}}":              "handlers.kata.tempDir",
		"relay: {concurrency: 0}":                                                                "relay.concurrency",
		"reconcileInterval: -1s":                                                                 "reconcileInterval",
		"http: {listen: nonsense}":                                                               "http.listen",
		"http: {listen: \"127.0.0.1:99999\"}":                                                    "http.listen",
		"http: {listen: \"127.0.0.1:0\"}":                                                        "http.listen",
		"http: {listen: \"127.0.0.1:http\"}":                                                     "http.listen",
		"http: {listen: \"300.0.0.1:9814\"}":                                                     "http.listen",
		"tracing: {endpoint: \"collector:0\"}":                                                   "tracing.endpoint",
		"tracing: {sampleRatio: 2}":                                                              "tracing.sampleRatio",
		"tracing: {sampleRatio: .nan}":                                                           "tracing.sampleRatio",
		"tracing: {endpoint: nonsense}":                                                          "tracing.endpoint",
		"handlers: {kata: {filesystem: [ext4]}}":                                                 "handlers.kata.filesystem: unknown key",
		"authorization: {admin: {uids: [4294967295]}}":                                           "authorization.admin",
		"runDir: \"/a\\nb\"":                                                                     "runDir",
		"http: {listen: \"unix:/" + strings.Repeat("x", 120) + "\"}":                             "http.listen",
		"front: {registry: x}":                                                                   "front.registry",
		"front: {registry: /var/lib/kubelet/plugins_registry/ours}":                              "kubelet looks into all that is below",
		"front: {kubeletRegistry: /var/lib/kubelet/crust-proxy}":                                 "front.registry",
		"front: {privateDir: /var/lib/kubelet/pods/x}":                                           "front.privateDir",
		"front: {privateDir: /var/lib/kubelet/plugins}":                                          "front.privateDir",
		"front: {privateDir: /var/lib/kubelet/plugins-2/x}":                                      "front.privateDir",
		"front: {defaultFSType: \"EXT4\"}":                                                       "front.defaultFSType",
		"front: {driverTimeout: 0}":                                                              "front.driverTimeout",
		"authorization: {csi: {uids: []}}":                                                       "authorization.csi",
		"policy: {format: always}":                                                               "policy.format",
		"policy: {rules: [{name: a, defer: true, driver: [x]}]}":                                 "policy.rules[0].driver: unknown key",
		"policy: {rules: [{name: a, defer: null}]}":                                              "policy.rules[0] (\"a\").defer: is missing",
		"policy: {rules: [{name: a, defer: 1}]}":                                                 "policy.rules[0].defer: the number 1",
		"policy: {rules: [{name: a, defer: true, rootMode: '4755'}]}":                            "rootMode",
		"policy: {rules: [{name: a, defer: true, rootMode: rwx}]}":                               "rootMode",
		"policy: {rules: [{name: a, defer: true, mkfsOptions: [-i, '1024']}]}":                   "name one filesystem",
		"policy: {rules: [{name: a, defer: true, filesystems: [ext4], mkfsOptions: [-F, '1']}]}": "mkfs.ext4's options",
		"policy: {rules: [{name: a, defer: false, rootMode: '0777'}]}":                           "no effect",
		"policy: {rules: [{name: a, defer: true, handler: runc}]}":                               "policy.rules[0] (\"a\").handler",
		"policy: {rules: [{name: a, defer: true}, {name: b, defer: true}]}":                      "policy.rules[1] (\"b\"): it can never match",
		"- a list":                                                                   "1:1: the configuration is not a map",
		"cluster: {kubeconfig: kubelet.conf}":                                        "cluster.kubeconfig",
		"cluster: {kubeconfig: /k, inCluster: true}":                                 "cluster.inCluster",
		"cluster: {kubeconfig: /k, nodeName: Node-1}":                                "cluster.nodeName",
		"cluster: {kubeconfig: /k, nodeName: \"a,metadata.name!=b\"}":                "cluster.nodeName",
		"cluster: {nodename: a}":                                                     "cluster.nodename: unknown key",
		"containerd: {socket: /run/c.sock}\ncri: {socket: /run/crio/crio.sock}":      "set containerd.socket to \"\"",
		"cri: {socket: /run/crio/crio.sock}":                                         "set containerd.socket to \"\"",
		"containerd: {socket: ''}\ncri: {socket: crio.sock}":                         "cri.socket: \"crio.sock\"",
		"containerd: {socket: ''}\ncri: {socket: /" + strings.Repeat("x", 200) + "}": "cri.socket: 201 bytes",
		"runDir: x\nkubeletRoot: z":                                                  "runDir: \nkubeletRoot: ",
		"front: {enabled: maybe}":                                                    "front.enabled: text cannot stand here; it takes true or false",
		"handlers: {kata: []}":                                                       "handlers.kata: a list cannot stand here; it takes a map of keys and values",
		"policy: {rules: 3}":                                                         "policy.rules: the number 3 cannot stand here; it takes a list",
		"policy: {rules: [{name: a, defer: true}, {defer: true, grow: 3}]}":          "policy.rules[1].grow: the number 3 cannot stand here; it takes true or false",
		"policy: {runtimes: [a]}":                                                    "policy.runtimes: a list cannot stand here; it takes a map of keys and values",
		"relay: {concurrency: 1.5}":                                                  "relay.concurrency: the number 1.5 cannot stand here; it takes a whole number",
		"authorization: {admin: {uids: [-1]}}":                                       "authorization.admin.uids[0]: the number -1 cannot stand here; it takes a whole number from 0 to 4294967295",
		"tracing: {sampleRatio: x}":                                                  "tracing.sampleRatio: text cannot stand here; it takes a number",
		"runtimeSocket: {mode: 0600}":                                                "runtimeSocket.mode: the number 0600 cannot stand here; it takes text (quote text",
		"policy: {runtimes: {kata: 3}}":                                              `1:21: policy.runtimes["kata"]: the number 3 cannot stand here; it takes text (quote text`,
		"relay: {statsTimeout: 10}":                                                  `relay.statsTimeout: 10 is not a duration: write one like "10s"`,
		"front:\n\tenabled: true":                                                    "2:1: this is not valid YAML: found character that cannot start any token (a tab?",
		"handlers: {kata: {enabled: {on: yes}}}":                                     "handlers.kata.enabled: a map of keys and values cannot stand here; it takes true or false",
	} {
		_, err := load(t, file)
		for line := range strings.SplitSeq(want, "\n") {
			check.That(t, err != nil && strings.Contains(err.Error(), line) && strings.Contains(err.Error(), "config.yaml:"), "%q: got %v; want %q", file, err, line)
		}
	}
	check.That(t, check.Err(load(t, "", "--config", "/does/not/exist")) != nil, "a missing file was taken")
}

func TestEitherHandlerCanBeOff(t *testing.T) {
	for file, want := range map[string]string{
		"handlers: {kata: {enabled: false}, crust: {enabled: true}}":  "crust [crust]",
		"handlers: {crust: {enabled: true}}":                          "kata [kata crust]",
		"handlers: {default: crust, crust: {enabled: true}}":          "crust [kata crust]",
		"handlers: {crust: {enabled: false, programs: [/opt/a, /b]}}": "kata [kata]",
	} {
		got := check.Value(load(t, file))(t)
		check.Equal(t, fmt.Sprint(got.Handlers.Default, " ", got.Handlers.names()), want, "%s", file)
	}
	_, restart := Reloadable(Default(), Config{Handlers: Handlers{Crust: Crust{Root: "/x"}}})
	check.That(t, slices.Contains(restart, "handlers.crust.root"), "a change of the root is not told to need a restart: %v", restart)
}

func TestGoodFiles(t *testing.T) {
	for _, file := range []string{
		"cluster: {kubeconfig: /etc/kubernetes/kubelet.conf}",
		"cluster: {inCluster: true, nodeName: ip-10-0-0-1.eu.compute.internal}",
		"containerd: {socket: ''}\ncri: {socket: /run/crio/crio.sock}",
		"containerd: {socket: /run/c.sock}",
		"containerd: {socket: ''}",
	} {
		check.NoError(t, check.Err(load(t, file)), "%s", file)
	}
	cfg, err := load(t, "", "--kubeconfig", "/etc/k", "--node-name", "a")
	check.That(t, err == nil && cfg.Cluster.On() && cfg.Cluster.NodeName == "a", "got %+v, %v", cfg.Cluster, err)
}

func TestOneKeyMovesADaemon(t *testing.T) {
	got := check.Value(load(t, "kubeletRoot: /k\n", "--run-dir", "/run/b"))(t)
	want := []string{
		"/run/b/runtime.sock", "/run/b/admin.sock", "/k/crust-proxy/registry", "/k/crust-proxy/marks", "/k/plugins_registry",
		"/k/plugins/kubernetes.io/csi/volumeDevices", "/dev", "/k/plugins",
	}
	f := got.Front
	paths := []string{got.RuntimeSocket.Path, got.AdminSocket.Path, f.Registry, f.MarksDir, f.KubeletRegistry, f.PrivateDir}
	check.Same(t, cmp.Diff(want, append(paths, got.Devices.Roots...)), "-want +got")
	got = check.Value(load(t, "devices: {roots: [/dev]}\nruntimeSocket: {path: /run/own}\n", "--run-dir", "/run/b"))(t)
	check.That(t, got.RuntimeSocket.Path == "/run/own" && len(got.Devices.Roots) == 1, "what was set is not kept: %+v", got)
}

// TestSampleFileSaysTheDefaults keeps the file that packages install honest.
func TestSampleFileSaysTheDefaults(t *testing.T) {
	raw := check.Value(os.ReadFile("../../../systemd/config.yaml"))(t)
	var live []string
	for line := range strings.SplitSeq(string(raw), "\n") {
		if key, ok := strings.CutPrefix(line, "#:"); ok {
			line = key // a setting that is shown commented out
		}
		if !strings.HasPrefix(strings.TrimSpace(line), "#") {
			live = append(live, line)
		}
	}
	check.Same(t, cmp.Diff(Default(), check.Value(Parse([]byte(strings.Join(live, "\n"))))(t)), "-want +got")
	text := check.Value(Default().YAML())(t)
	for line := range strings.SplitSeq(text, "\n") {
		key, _, _ := strings.Cut(strings.TrimSpace(line), ":")
		check.That(t, key == "" || strings.HasPrefix(key, "-") || strings.Contains(string(raw), key+":"), "the sample does not show %s", key)
	}
}

func TestReloadable(t *testing.T) {
	next := Default()
	next.Log.Level = "debug"
	next.Authorization.Admin.UIDs = []uint32{0, 7}
	next.Devices.Images = []string{"/images"}
	next.Relay.Concurrency = 3
	next.Policy.Rules = []policy.Rule{{Name: "all", Defer: true}}
	next.Front.Enabled = true
	next.RunDir = "/run/other"
	next.Handlers.Kata.Filesystems = []string{"ext4"}
	applied, restart := Reloadable(Default(), next)
	want := next
	want.RunDir, want.Handlers, want.Front = Default().RunDir, Default().Handlers, Default().Front
	check.Same(t, cmp.Diff(want, applied), "-want +got")
	check.Same(t, cmp.Diff([]string{"runDir", "handlers.kata.filesystems", "front.enabled"}, restart), "-want +got")
}

// TestRulesWaitForWhatTheyNeed: without the cluster no pod is known, and without its handler a rule can do nothing.
// Until the restart such rules would refuse volumes, or leave those of pods that ask on the host without a word.
func TestRulesWaitForWhatTheyNeed(t *testing.T) {
	old := Default()
	old.Front.Enabled = true
	old.Policy.Rules = []policy.Rule{{Name: "before", Defer: true}}
	cluster := func(c *Config) { c.Cluster.Kubeconfig = "/etc/kubernetes/kubelet.conf" }
	for _, test := range []struct {
		change  func(*Config)
		rule    policy.Rule
		restart []string
	}{
		{cluster, policy.Rule{RuntimeHandlers: []string{"kata"}, Annotated: true, Defer: true}, []string{"policy.rules", "cluster.kubeconfig"}},
		{cluster, policy.Rule{RuntimeHandlers: []string{"kata"}, Defer: true}, []string{"policy.rules", "cluster.kubeconfig"}},
		{cluster, policy.Rule{Namespaces: []string{"a"}}, []string{"policy.rules", "cluster.kubeconfig"}},
		{cluster, policy.Rule{Drivers: []string{"a"}, Defer: true}, []string{"cluster.kubeconfig"}},
		{func(*Config) {}, policy.Rule{RuntimeHandlers: []string{"kata"}, Defer: true}, nil}, // its error is what the file asks for
		{
			func(c *Config) { c.Handlers.Crust.Enabled, c.Policy.Runtimes = true, map[string]string{"own": "crust"} },
			policy.Rule{Drivers: []string{"a"}, Defer: true}, []string{"handlers.crust.enabled", "policy.runtimes", "policy.rules"},
		},
		{func(c *Config) { c.Handlers.Crust.Enabled = true }, policy.Rule{Handler: "crust", Defer: true}, []string{"handlers.crust.enabled", "policy.rules"}},
		{
			func(c *Config) { c.Handlers.Crust.Enabled, c.Handlers.Default = true, "crust" },
			policy.Rule{Drivers: []string{"a"}, Defer: true}, []string{"handlers.default", "handlers.crust.enabled", "policy.rules"},
		},
	} {
		next := old
		test.change(&next)
		test.rule.Name = "after"
		next.Policy.Rules = []policy.Rule{test.rule}
		check.Must(t, next.Validate())
		applied, restart := Reloadable(old, next)
		err, want := applied.Validate(), "after"
		if slices.Contains(test.restart, "policy.rules") {
			want = "before"
		}
		check.That(t, err == nil && applied.Policy.Rules[0].Name == want, "in force is %+v: %v", applied.Policy.Rules, err)
		check.Same(t, cmp.Diff(test.restart, restart), "-want +got")
	}
}

// TestDevicesWaitForPrivatePaths: until the restart drivers are asked for devices below the old directory.
func TestDevicesWaitForPrivatePaths(t *testing.T) {
	old := Default()
	applied, restart := Reloadable(old, check.Value(Parse([]byte("kubeletRoot: /kubelet")))(t))
	diff := cmp.Diff(old, applied)
	check.That(t, diff == "" && slices.Contains(restart, "devices.roots") && slices.Contains(restart, "kubeletRoot"), "%v %v", restart, diff)
}

// TestNoHandlerLeft: no empty list is shown of what is left.
func TestNoHandlerLeft(t *testing.T) {
	_, err := load(t, "{handlers: {kata: {enabled: false}, default: kata}, policy: {rules: [{name: r, defer: true, handler: kata}]}}")
	check.Require(t, err != nil, "it was accepted")
	for line := range strings.Lines(err.Error()) {
		line = strings.TrimSpace(line)
		check.That(t, !strings.HasSuffix(line, " of") && !strings.HasSuffix(line, ":"), "it is said of an empty list: %s", line)
	}
}

func TestWarnings(t *testing.T) {
	const (
		front   = "front: {enabled: true}\n"
		cluster = "cluster: {inCluster: true}\n"
		rule    = "policy: {rules: [{name: a, runtimeHandlers: [kata], defer: true}]}\n"
		always  = "policy: {rules: [{name: a, defer: true}]}\n"
	)
	for file, want := range map[string]string{
		"":             "",
		always:         "front.enabled is false",
		front + always: "the fsGroup of pods has no effect",
		front + rule:   `policy.rules[0] ("a").runtimeHandlers: no pod is known here`,
		front + "policy: {rules: [{name: a, needs: [subPath], defer: false}]}":           `policy.rules[0] ("a").needs: no pod is known here`,
		front + "policy: {rules: [{name: a, storageClasses: [x], defer: false}]}":        `.storageClasses: no pod is known here`,
		front + "policy: {rules: [{name: a, namespaces: [x], defer: false}]}":            `.namespaces: no pod is known here`,
		front + cluster + "policy: {rules: [{name: a, needs: [fsGroup], defer: false}]}": "",
		front + cluster + rule:                               "",
		front + "policy: {rules: [{name: a, defer: false}]}": "",
		"reconcileInterval: 0s":                              "reconcileInterval: 0 is never",
		"reconcileInterval: 6m":                              "CrustProxyRepairsFail",
		"containerd: {socket: ''}":                           "handlers.kata: sandboxes of runtime-rs are not found",
		"containerd: {namespace: k8s.io}":                    "", // older files have it
		"containerd: {namespace: moby}":                      "containerd.namespace: it has no effect",
		"front: {privateDir: /var/lib/kubelet/plugins/x}":    "front.privateDir: it is not below",
	} {
		got := strings.Join(check.Value(load(t, file))(t).Warnings(), "\n")
		check.That(t, (want == "") == (got == "") && strings.Contains(got, want), "%s\ngot %q\nwant %q", file, got, want)
	}
}

// TestConffileNeverChanges: a package that brings another one has dpkg ask each administrator who edited
// it, and an unattended upgrade stop half-configured.
func TestConffileNeverChanges(t *testing.T) {
	raw := check.Value(os.ReadFile("../../../packaging/config.yaml"))(t)
	check.Equal(t, fmt.Sprintf("%x", sha256.Sum256(raw)), "0bc7e818ed02ed7961de39980eff833b7c6b529b8aa7a5107cad2501a9e821c6", "it is another file")
	got, err := load(t, string(raw))
	check.That(t, err == nil && reflect.DeepEqual(got, Default()), "it sets something: %v, %+v", err, got)
}

// TestSampleRulesAreGood reads the example that the sample file shows as a comment.
func TestSampleRulesAreGood(t *testing.T) {
	raw := check.Value(os.ReadFile("../../../systemd/config.yaml"))(t)
	example := "policy:\n"
	for line := range strings.SplitSeq(string(raw), "\n") {
		if text, ok := strings.CutPrefix(line, "  #   "); ok {
			example += "  " + text + "\n"
		}
	}
	got, err := load(t, example)
	check.Require(t, err == nil, "%v in\n%s", err, example)
	check.That(t, len(got.Policy.Rules) == 5, "got %d rules from\n%s", len(got.Policy.Rules), example)
}

func TestPolicyForTheCore(t *testing.T) {
	got := check.Value(load(t, `
policy:
  format: never
  rules:
    - {name: a, drivers: [d], filesystems: [xfs], runtimeHandlers: [kata], accessModes: [SINGLE_NODE_WRITER], defer: true, handler: kata, format: guest, mkfsOptions: ["-i", "size=1024"], rootMode: "2777", grow: false}
    - {name: asked, annotated: true, runtimeHandlers: [crust, kata-clh], defer: true}
    - {name: b, defer: false}
`))(t)
	want := &policy.Policy{Format: volume.FormatNever, Rules: []policy.Rule{
		{Name: "a", Drivers: []string{"d"}, Filesystems: []string{"xfs"}, RuntimeHandlers: []string{"kata"},
			AccessModes: []string{"SINGLE_NODE_WRITER"}, Defer: true, Handler: "kata", Format: volume.FormatGuest,
			MkfsOptions: []string{"-i", "size=1024"}, RootMode: "2777", Grow: new(false)},
		{Name: "asked", Annotated: true, RuntimeHandlers: []string{"crust", "kata-clh"}, Defer: true},
		{Name: "b"},
	}, Runtimes: got.DeferralPolicy().Runtimes}
	check.Same(t, cmp.Diff(want, got.DeferralPolicy()), "-want +got")
}

func TestRulesForPodsThatAskNeedACluster(t *testing.T) {
	const rules = "policy: {rules: [{name: asked, annotated: true, runtimeHandlers: [kata], defer: true}]}\n"
	for text, ok := range map[string]bool{
		"":                         true, // the front is off, and the rules mean nothing
		"front: {enabled: true}\n": false,
		"front: {enabled: true}\ncluster: {kubeconfig: /etc/k}\n": true,
		"front: {enabled: true}\ncluster: {inCluster: true}\n":    true,
	} {
		_, err := load(t, text+rules)
		check.That(t, (err == nil) == ok && (err == nil || strings.Contains(err.Error(), "policy.rules[0] (\"asked\").annotated")),
			"%q: %v", text, err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(check.Value(Default().YAML())(f))
	f.Add("relay: {statsTimeout: 1e9}")
	f.Add("reconcileInterval: null\nrelay:\n")
	f.Add("? [a]\n: b")
	f.Add("policy: {format: guest, rules: [{name: a, drivers: [\"*\"], defer: true}, null]}")
	f.Add("front: {enabled: true, registry: \"\"}")
	f.Fuzz(func(t *testing.T, text string) {
		cfg, err := Parse([]byte(text))
		if err != nil || cfg.Validate() != nil {
			return
		}
		again := check.Value(cfg.YAML())(t)
		back, err := Parse([]byte(again))
		check.That(t, err == nil && back.Validate() == nil, "a valid configuration does not survive being written down: %v", err)
	})
}
