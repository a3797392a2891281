package doctor

import (
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/test/check"
)

const (
	etcKata = "/etc/kata-containers"
	usrKata = "/usr/share/defaults/kata-containers"
	optKata = "/opt/kata/share/defaults/kata-containers"
	blocked = "# Kata\n[hypervisor.qemu]\n\ndisable_block_device_use = true\n"
)

func TestBlockDevicesDisabled(t *testing.T) {
	cases := map[string]struct {
		files map[string]string
		want  Severity
		seen  string
		do    string
	}{
		"names file and line": {map[string]string{etcKata + "/configuration.toml": blocked},
			Error, etcKata + "/configuration.toml:4: [hypervisor.qemu] disable_block_device_use = true", "= false in " + etcKata + "/configuration.toml:4"},
		"a shim's own file": {map[string]string{optKata + "/configuration-qemu.toml": blocked}, Error, "configuration-qemu.toml:4", "config.d"},
		"runtime-rs": {map[string]string{optKata + "/runtime-rs/configuration-dragonball.toml": "[hypervisor.dragonball]\ndisable_block_device_use=true"},
			Error, "runtime-rs/configuration-dragonball.toml:2: [hypervisor.dragonball]", ""},
		"drop-in turns it on": {map[string]string{etcKata + "/config.d/10-x.toml": blocked}, Error, "config.d/10-x.toml:4 (a drop-in of /etc/kata-containers/configuration.toml)", "10-x.toml:4"},
		"drop-in turns it off": {map[string]string{etcKata + "/configuration.toml": blocked,
			etcKata + "/config.d/99.toml": "hypervisor.qemu.disable_block_device_use = false\n"}, OK, "let block devices through", ""},
		"a later drop-in wins": {map[string]string{etcKata + "/config.d/10.toml": "[hypervisor.qemu]\ndisable_block_device_use = false",
			etcKata + "/config.d/20.toml": blocked}, Error, "20.toml:4", ""},
		"another table first": {map[string]string{etcKata + "/configuration.toml": "[x]\ndisable_block_device_use = true\n" + blocked}, Error, "toml:6: [hypervisor.qemu]", ""},
		"an inline table":     {map[string]string{usrKata + "/configuration-clh.toml": "hypervisor = { clh = { disable_block_device_use = true } }"}, Error, ":1: [hypervisor.clh]", ""},
		"shadowed by /etc":    {map[string]string{usrKata + "/configuration.toml": blocked}, Warn, "else " + etcKata + "/configuration.toml is read", ""},
		"a comment only":      {map[string]string{etcKata + "/configuration.toml": "[hypervisor.qemu]\n#disable_block_device_use = true\n"}, OK, "let block", ""},
		"in a string":         {map[string]string{etcKata + "/configuration.toml": "[hypervisor.qemu]\nx = '''\ndisable_block_device_use = true\n'''\n"}, OK, "let block", ""},
		"of an RPM":           {map[string]string{"/usr/share/kata-containers/defaults/configuration.toml": "[hypervisor.qemu]\nrootless = true\n"}, Warn, "rootless", ""},
		"rootless":            {map[string]string{etcKata + "/configuration.toml": "[hypervisor.qemu]\nrootless = true\n"}, Warn, ":2: [hypervisor.qemu] rootless", "rootless = false"},
		"broken":              {map[string]string{etcKata + "/configuration.toml": "[hypervisor.qemu\n"}, Error, "cannot be read", "refuses"},
		"not a configuration": {map[string]string{etcKata + "/other.toml": blocked}, OK, "let block", ""},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			tr := newTree(t)
			for path, text := range c.files {
				tr.write(path, text)
			}
			assertFinding(t, findingsOf(t, "kata-config", tr.node, healthyDaemon()), bad{want: c.want, seen: c.seen, do: c.do})
		})
	}
}

// TestConfigurationsByConfigPath: the files that count are those that the container
// runtime names, wherever they are, and what the setting does depends on the runtime.
func TestConfigurationsByConfigPath(t *testing.T) {
	const (
		v1     = `version = 2` + "\n" + `[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.kata-qemu]` + "\n"
		v2     = `version = 3` + "\n" + `[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.%s]` + "\n"
		isKata = `runtime_type = "io.containerd.kata-qemu.v2"` + "\n"
		drop   = "/opt/kata/containerd/config.d/kata-deploy.toml"
	)
	path := func(p string) string { return `options = {ConfigPath = "` + p + `"}` + "\n" }
	named := func(name string) string { return strings.Replace(v2, "%s", name, 1) }
	imports := `imports = ["/opt/kata/containerd/config.d/*.toml"]`
	const goDoes, rustDoes = "the container gets the guard", "unsupported driver type"
	cases := map[string]struct {
		files map[string]string
		want  Severity
		seen  []string
	}{
		"anywhere": {map[string]string{containerdConfigs[0]: v1 + isKata + path("/srv/kata.toml"), "/srv/kata.toml": blocked},
			Error, []string{"/srv/kata.toml:4", goDoes, "runtime kata-qemu reads"}},
		"k3s, imported": {map[string]string{containerdConfigs[1]: imports, drop: named("kata-x") + isKata + path("/srv/kata.toml"), "/srv/kata.toml": blocked},
			Error, []string{"/srv/kata.toml:4", "runtime kata-x reads"}},
		"imports itself": {map[string]string{containerdConfigs[0]: `imports = ["config.toml"]` + "\n" + v1 + isKata + path("/srv/kata.toml"), "/srv/kata.toml": blocked},
			Error, []string{"runtime kata-qemu reads"}},
		"CRI-O": {map[string]string{crioDropIn + "/99-kata": "[crio.runtime.runtimes.kata]\nruntime_type = \"vm\"\nruntime_path = \"/opt/kata/bin/containerd-shim-kata-v2\"\n" +
			"runtime_config_path = \"/srv/kata.toml\"\n", "/srv/kata.toml": blocked}, Error, []string{"/srv/kata.toml:4", "runtime kata reads"}},
		"Go by default":           {map[string]string{etcKata + "/configuration.toml": blocked}, Error, []string{goDoes}},
		"a default that is named": {map[string]string{containerdConfigs[0]: v1 + isKata + path(usrKata+"/configuration.toml"), usrKata + "/configuration.toml": blocked}, Error, []string{"runtime kata-qemu reads"}},
		"not there":               {map[string]string{containerdConfigs[0]: v1 + isKata + path("/srv/kata.toml")}, Error, []string{"/srv/kata.toml cannot be read"}},
		"nobody names it": {map[string]string{containerdConfigs[0]: v1 + isKata + path("/srv/kata.toml"), "/srv/kata.toml": "", optKata + "/configuration-clh.toml": blocked},
			Warn, []string{"configuration-clh.toml:4", "no runtime"}},
		"gVisor's own":        {map[string]string{containerdConfigs[0]: v1 + "runtime_type = \"io.containerd.runsc.v1\"\n" + path("/srv/runsc.toml"), "/srv/runsc.toml": blocked}, OK, []string{"let block"}},
		"not readable":        {map[string]string{containerdConfigs[0]: "[[["}, OK, []string{"let block"}},
		"kata-deploy's":       {map[string]string{optKata + "/runtimes/qemu/configuration-qemu.toml": blocked}, Error, []string{"/runtimes/qemu/configuration-qemu.toml:4", goDoes}},
		"kata-deploy's, rust": {map[string]string{optKata + "/runtime-rs/runtimes/x/configuration-x.toml": blocked}, Error, []string{rustDoes}},
		"OpenVMM": {map[string]string{optKata + "/runtime-rs/runtimes/openvmm-azure-runtime-rs/configuration-openvmm-azure-runtime-rs.toml": "[hypervisor.openvmm]\ndisable_block_device_use = true\n"},
			Error, []string{"configuration-openvmm-azure-runtime-rs.toml:2: [hypervisor.openvmm]", rustDoes}},
		"Kata's version":         {map[string]string{"/opt/kata/VERSION": "4.2.0\n"}, OK, []string{"files of Kata 4.2.0 let block"}},
		"no version":             {map[string]string{"/opt/kata/VERSION": "4.2\x1b[2J\n"}, OK, []string{"files let block"}},
		"a custom runtime":       {map[string]string{optKata + "/custom-runtimes/mine/configuration-qemu.toml": blocked}, Error, []string{"/custom-runtimes/mine/configuration-qemu.toml:4"}},
		"a custom one's drop-in": {map[string]string{optKata + "/custom-runtimes/mine/configuration-qemu.toml": blocked, optKata + "/custom-runtimes/mine/config.d/50.toml": strings.Replace(blocked, "true", "false", 1)}, OK, []string{"let block"}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			tr := newTree(t)
			for path, text := range c.files {
				tr.write(path, text)
			}
			got := findingsOf(t, "kata-config", tr.node, healthyDaemon())
			for _, seen := range c.seen {
				assertFinding(t, got, bad{want: c.want, seen: seen})
			}
			check.That(t, len(got) == 1, "%d findings: %+v", len(got), got)
		})
	}
}

func TestSymlinkedDefaultIsReportedOnce(t *testing.T) {
	tr := newTree(t)
	tr.remove(etcKata)
	tr.write(optKata+"/configuration-qemu.toml", blocked)
	tr.symlink("configuration-qemu.toml", optKata+"/configuration.toml")
	got := findingsOf(t, "kata-config", tr.node, healthyDaemon())
	check.That(t, len(got) == 1 && got[0].Severity == Error && strings.Contains(got[0].Seen, "configuration-qemu.toml:4 (which "+optKata+"/configuration.toml leads to)"),
		"got %+v", got)
}

func FuzzMountInfoFile(f *testing.F) {
	f.Add([]byte(goodInfo), "L2E=")
	f.Fuzz(func(t *testing.T, data []byte, name string) {
		tr := tree{t: t, node: Node{Root: t.TempDir()}}
		tr.write("/v/"+abi.InfoName, string(data))
		kataVolume{tr.node, "/v", "/a"}.checkInfo()
		path, err := volumePath(name)
		check.That(t, err != nil || strings.HasPrefix(path, "/"), "%q is no path", path)
	})
}
