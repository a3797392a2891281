package config

import (
	"reflect"
	"strings"
)

// Reloadable returns old with what a running daemon can take over from next, and the keys
// of what needs a restart. A policy that needs a cluster waits for it, and for the restart.
func Reloadable(old, next Config) (applied Config, needRestart []string) {
	applied = old
	applied.Log = next.Log
	applied.Authorization = next.Authorization
	applied.Devices = next.Devices
	applied.Relay = next.Relay
	applied.Policy = next.Policy
	if applied.annotatedNeedsCluster() != nil {
		applied.Policy = old.Policy
	}
	return applied, differences(reflect.ValueOf(applied), reflect.ValueOf(next), "")
}

func differences(a, b reflect.Value, prefix string) []string {
	var keys []string
	for i := range a.NumField() {
		name, _, _ := strings.Cut(a.Type().Field(i).Tag.Get("json"), ",")
		key := prefix + name
		if a.Field(i).Kind() == reflect.Struct {
			keys = append(keys, differences(a.Field(i), b.Field(i), key+".")...)
		} else if !reflect.DeepEqual(a.Field(i).Interface(), b.Field(i).Interface()) {
			keys = append(keys, key)
		}
	}
	return keys
}
