package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"fmt"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

const repository = "https://github.com/crust-proxy/crust-proxy"

// sbom prints what programs contain, as they themselves say, and which of Debian's packages an image has.
func sbom(version, packages string, programs []string) error {
	components := make(map[string]object) // by bom-ref
	dependsOn := make(map[string][]string)
	for _, path := range programs {
		info, err := buildinfo.ReadFile(path)
		if err != nil {
			return err
		}
		arch := ""
		for _, setting := range info.Settings {
			if setting.Key == "GOARCH" {
				arch = setting.Value
			}
		}
		// What the tag says has to be what the program says of itself.
		if info.Main.Version != version {
			return fmt.Errorf("%s is of version %s, and this is %s", path, info.Main.Version, version)
		}
		name := filepath.Base(path)
		ref := name + "-" + arch
		components[ref] = object{"type": "application", "bom-ref": ref, "name": name, "version": version, "properties": []object{{"name": "arch", "value": arch}}}
		purls := []string{library(components, "golang", "stdlib", strings.TrimPrefix(info.GoVersion, "go"), "")}
		for _, module := range info.Deps {
			if module.Replace != nil {
				module = module.Replace
			}
			purls = append(purls, library(components, "golang", module.Path, module.Version, ""))
		}
		slices.Sort(purls)
		dependsOn[ref] = slices.Compact(purls)
	}
	image, err := debian(components, packages)
	if err != nil {
		return err
	}
	dependsOn["image"] = image
	components["image"] = object{"type": "container", "bom-ref": "image", "name": "crust-proxy image", "version": version}
	return printJSON(bom(version, components, dependsOn))
}

// library adds a library and returns its package URL.
func library(components map[string]object, kind, name, version, arch string) string {
	purl := "pkg:" + kind + "/" + name + "@" + url.PathEscape(version)
	if arch != "" {
		purl += "?arch=" + arch
	}
	components[purl] = object{"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
	return purl
}

func debian(components map[string]object, packages string) ([]string, error) {
	raw, err := os.ReadFile(packages) //nolint:gosec // of the release
	if err != nil {
		return nil, err
	}
	purls := []string{}
	for line := range strings.Lines(string(raw)) {
		fields := strings.Fields(line)
		if len(fields) != 3 {
			return nil, fmt.Errorf("%s: %q is not NAME VERSION ARCH", packages, line)
		}
		purls = append(purls, library(components, "deb", "debian/"+fields[0], fields[1], fields[2]))
	}
	return purls, nil
}

func bom(version string, components map[string]object, dependsOn map[string][]string) object {
	list, dependencies, refs := []object{}, []object{}, []string{}
	for _, ref := range slices.Sorted(maps.Keys(components)) {
		list = append(list, components[ref])
	}
	for _, ref := range slices.Sorted(maps.Keys(dependsOn)) {
		dependencies = append(dependencies, object{"ref": ref, "dependsOn": dependsOn[ref]})
		refs = append(refs, ref)
	}
	dependencies = append(dependencies, object{"ref": "crust-proxy", "dependsOn": refs})
	id := sha256.Sum256(fmt.Append(nil, list, dependencies))
	id[6], id[8] = id[6]&0x0f|0x80, id[8]&0x3f|0x80 // a UUID of version 8: of the content
	return object{
		"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
		"serialNumber": fmt.Sprintf("urn:uuid:%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:16]),
		"metadata": object{"timestamp": sourceTime(), "component": object{
			"type": "application", "bom-ref": "crust-proxy", "name": "crust-proxy", "version": version,
			"licenses":           []object{{"license": object{"id": "Apache-2.0"}}},
			"externalReferences": []object{{"type": "vcs", "url": repository}},
		}},
		"components": list, "dependencies": dependencies,
	}
}

// sourceTime is the time of the commit: the same sources give the same files.
func sourceTime() string {
	seconds, _ := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64)
	return time.Unix(seconds, 0).UTC().Format(time.RFC3339)
}
