package doctor

import (
	"strings"
	"testing"
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
		"an inline table":     {map[string]string{usrKata + "/configuration-clh.toml": "hypervisor = { clh = { disable_block_device_use = true } }"}, Error, ":1: [hypervisor.clh]", ""},
		"shadowed by /etc":    {map[string]string{usrKata + "/configuration.toml": blocked}, Warn, "else " + etcKata + "/configuration.toml is read", ""},
		"a comment only":      {map[string]string{etcKata + "/configuration.toml": "[hypervisor.qemu]\n#disable_block_device_use = true\n"}, OK, "let block", ""},
		"in a string":         {map[string]string{etcKata + "/configuration.toml": "[hypervisor.qemu]\nx = '''\ndisable_block_device_use = true\n'''\n"}, OK, "let block", ""},
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

func TestSymlinkedDefaultIsReportedOnce(t *testing.T) {
	tr := newTree(t)
	tr.remove(etcKata)
	tr.write(optKata+"/configuration-qemu.toml", blocked)
	tr.symlink("configuration-qemu.toml", optKata+"/configuration.toml")
	got := findingsOf(t, "kata-config", tr.node, healthyDaemon())
	if len(got) != 1 || got[0].Severity != Error || !strings.Contains(got[0].Seen, "configuration-qemu.toml:4 (which "+optKata+"/configuration.toml leads to)") {
		t.Errorf("got %+v", got)
	}
}

func FuzzBooleans(f *testing.F) {
	f.Add([]byte(blocked))
	f.Add([]byte("a.b = { c = true, d = [ { e = false } ] }\n[[x]]\ny = true"))
	f.Fuzz(func(t *testing.T, data []byte) {
		found, err := booleans("f", data)
		if err != nil {
			return
		}
		for _, s := range found {
			if s.line < 1 || s.line > strings.Count(string(data), "\n")+1 {
				t.Errorf("line %d of %q", s.line, data)
			}
		}
	})
}

func FuzzMountInfoFile(f *testing.F) {
	f.Add([]byte(goodInfo), "L2E=")
	f.Fuzz(func(t *testing.T, data []byte, name string) {
		tr := tree{t: t, node: Node{Root: t.TempDir()}}
		tr.write("/m", string(data))
		tr.node.mountInfo("/m", "/a")
		if path, err := volumePath(name); err == nil && !strings.HasPrefix(path, "/") {
			t.Errorf("%q is no path", path)
		}
	})
}
